"""π0 and π0.5 as policies: small ones keep the contract in all variants and train in a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.long import long
from tests.pipeline.runs import config
from tests.plugins.trial.test_policy_contract import CONTINUOUS, PICTURE, TASKS, Case

from polyrhythm.config.registry import resolve
from polyrhythm.conformance import run_checks
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import sample
from polyrhythm.plugins.vla.pi0.settings import Pi0Settings, Pi0SizeSettings, Pi05Settings
from polyrhythm.policies.base import as_module
from polyrhythm.specs import EnvSpec

SPEC = EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)
SMALL = {
    "width": 32,
    "mlp": 48,
    "layers": 2,
    "heads": 2,
    "head_dim": 16,
    "expert_width": 24,
    "expert_mlp": 32,
    "vision_width": 24,
    "vision_layers": 1,
    "vision_heads": 2,
    "image": 28,
    "patch": 14,
    "words": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "flow_sde": {},
    "flow_cps": {"method": "flow_cps"},
    "flow_noise": {"method": "flow_noise", "horizon": 4},
    "expert": {"train": "expert"},
    "head": {"train": "head"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16 flow_noise": {"dtype": "bfloat16", "method": "flow_noise"},
    "a value per action": {"value_level": "action", "value_detach": False},
}
KINDS = {"pi0": Pi0Settings, "pi05": Pi05Settings}


def case(kind: str, **changes: Any) -> Case:
    section = {"type": kind, "size": SMALL, "chunk": 2, "dtype": "float32", **changes}
    return Case(resolve("policy", section), SPEC)


#: What the other of the two, or another variant, is usually tried for.
USUAL = (("pi0", "flow_sde"), ("pi0", "bfloat16 flow_noise"), ("pi05", "flow_sde"), ("pi05", "a value per action"))
CHECKED = [
    pytest.param(kind, variant, marks=() if (kind, variant) in USUAL else long(1, f"{kind}, {variant}"))
    for kind in KINDS
    for variant in VARIANTS
]


@pytest.mark.parametrize(("kind", "variant"), CHECKED)
def test_every_check_passes_without_a_note(kind: str, variant: str) -> None:
    found = case(kind, **VARIANTS[variant])
    checks = conformance.policy_checks(found.settings, found.observations(), SPEC, learns=True, imitates=True)
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("pi0", "all"),
        ("pi05", "expert"),
        pytest.param("pi0", "expert", marks=long(1, "pi0, expert")),
        pytest.param("pi05", "all", marks=long(1, "pi05, all")),
    ],
)
def test_two_updates_of_a_run(kind: str, variant: str, tmp_path: Path) -> None:
    lamps = {"type": "tests.pipeline.pictures:LampSettings"}
    section = {"type": kind, "size": SMALL, "state": "left", "chunk": 2, "dtype": "float32", "train": variant}
    method = {"all": "flow_noise", "expert": "flow_sde"}[variant]
    run = config(env=lamps, policy=section | {"method": method, "steps": 2}, training={"versions": 2})
    summary = train(validate_run(run), tmp_path)
    assert summary["ledger"]["trained"] == 2 * run.training.batch_size
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "train/actor/policy_loss" in line]
    assert len(updates) == 2
    assert all(line["train/actor/grad_norm"] > 0 for line in updates)
    assert all(abs(line["train/actor/mismatch_kl"]) < 1e-6 for line in updates), "generator and trainer agree"


def test_small_default_is_under_five_million_parameters() -> None:
    for settings in (Pi0Settings(), Pi05Settings()):
        assert settings.form(SPEC).parameters < 2_000_000


@pytest.mark.parametrize(("kind", "numbers"), [("pi0", 3_501_372_176), ("pi05", 3_616_757_520)])
def test_full_size_form_is_made_without_weights(kind: str, numbers: int) -> None:
    form = resolve("policy", {"type": kind, "size": "released", "train": "expert"}).form(SPEC)
    ours = sum(spec.shape and torch.Size(spec.shape).numel() for n, spec in form.published.items() if "critic" in n)
    assert form.parameters == numbers + ours
    network = {name for name in form.published if name.startswith("network.")}
    assert network
    assert not any(".paligemma." in name or "lm_head" in name for name in network)
    assert form.act_bytes < 1.04 * 2 * form.parameters  # bfloat16, but for norms and the like


def test_wrong_settings_are_one_sentence() -> None:
    with pytest.raises(ValidationError, match=r"vision_width = 64 is not a multiple of vision_heads = 5"):
        Pi0Settings(size=Pi0SizeSettings(vision_heads=5))
    with pytest.raises(ValidationError, match=r"image = 56 is not a multiple of patch = 15"):
        Pi0Settings(size=Pi0SizeSettings(patch=15))
    with pytest.raises(ValueError, match=r"policy.chunk = 5: the network predicts 3 actions; lower it"):
        Pi0Settings(chunk=5, horizon=3).form(SPEC)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ({"vision_heads": 5}, "policy.size = .*: policy.size.vision_width = 64 is not a multiple of vision_heads = 5"),
        ({"widht": 5}, "policy.size.widht = 5: no such key; did you mean .*width"),
        (3, "policy.size = 3: it must be a section"),
        ("huge", "'huge': it must be 'released'"),
    ],
)
@pytest.mark.parametrize("kind", ["pi0", "openvla_oft", "groot_n1d5"])
def test_a_wrong_size_is_one_problem(kind: str, size: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        config(policy={"type": kind, "size": size})
    assert len(caught.value.problems) == 1


def test_a_prompt_length_that_is_no_number_is_one_sentence(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent / "golden" / "pi0", tmp_path / "x")
    file = tmp_path / "x" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_max_length": "48"}))
    with pytest.raises(ConfigError, match="tokenizer_max_length = '48', which is not a number; copy"):
        Pi0Settings(checkpoint=str(tmp_path / "x"), tokenizer="words", robot="bounds").form(SPEC)


@pytest.mark.parametrize("kind", ["pi0", "pi05", "groot_n1d5"])
def test_an_environment_without_a_state_is_one_sentence(kind: str) -> None:
    blind = EnvSpec({"image": PICTURE["image"]}, CONTINUOUS, TASKS, 50)
    settings = resolve("policy", {"type": kind})
    with pytest.raises(ConfigError, match=r"policy.state = 'proprio': .* needs the robot's state .*; name one of them"):
        settings.form(blind)


def test_pi05_without_the_state_in_its_prompt_needs_none() -> None:
    blind = EnvSpec({"image": PICTURE["image"]}, CONTINUOUS, TASKS, 50)
    settings = resolve("policy", {"type": "pi05", "size": SMALL, "dtype": "float32", "state_in_prompt": False})
    assert sample(Case(settings, blind).build(), Case(settings, blind).observations()).value.shape == (12,)


def test_the_seed_decides_the_weights_whatever_is_frozen() -> None:
    """Frozen tensors are not published, so a generator must have them from its own build."""
    settings = case("pi0", train="expert").settings
    acting, training = (settings.build(SPEC, seed=4, device="cpu", role=role) for role in ("act", "train"))
    published = training.published()
    assert set(published) < set(training.state_dict())
    assert all(torch.equal(tensor, training.state_dict()[name]) for name, tensor in acting.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations_give_equal_gradients(kind: str) -> None:
    """Keys and values of the prefix reach the expert, and their gradients the prefix, with checkpointing too."""
    plain, again = (case(kind, gradient_checkpointing=flag) for flag in (False, True))
    obs, gradients = plain.observations(), []
    for found in (plain, again):
        policy = as_module(found.build())
        policy.sft_loss(obs, torch.zeros(12, 2, 3)).backward()
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any(".paligemma.model.vision_tower." in name for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_alone_learn(kind: str) -> None:
    found = case(kind, train="lora", lora={"rank": 4, "also": ["action_out_proj.*"]}, sft_draws=8)
    policy, obs = as_module(found.build()), found.observations()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert any("language_model" in name and "lora_A" in name for name in trained)
    assert all("lora_" in name or "critic" in name or "action_out_proj" in name for name in trained)
    frozen = {name: tensor.clone() for name, tensor in policy.state_dict().items() if name not in trained}
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = policy.sft_loss(obs, torch.full((12, 2, 3), 0.5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert all(torch.equal(policy.state_dict()[name], tensor) for name, tensor in frozen.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_from_a_folder_has_its_network(kind: str) -> None:
    folder = Path(__file__).parent / "golden" / kind
    section = {"type": kind, "checkpoint": str(folder), "tokenizer": "words", "robot": "bounds", "dtype": "float32"}
    settings = resolve("policy", section)
    form = settings.form(SPEC)
    assert form.answers["before"].shape == (5, 8)
    policy = settings.build(SPEC, seed=0, device="cpu", role="act")
    stored = load_file(folder / "weights.safetensors")
    network = {name.removeprefix("network."): x for name, x in policy.state_dict().items() if "network." in name}
    assert network.keys() == stored.keys()
    assert all(torch.equal(network[name], stored[name]) for name in stored)
    act = sample(policy, Case(settings, SPEC).observations())
    assert act.actions.shape == (12, 5, 3)
    given = policy.inputs(Case(settings, SPEC).observations())
    assert given["images"].shape == (12, 1, 3, 42, 42)
    assert given["state"].shape == (12, 8)


def test_a_folder_of_the_other_kind_is_refused() -> None:
    folder = Path(__file__).parent / "golden" / "pi05"
    with pytest.raises(ConfigError, match=r"policy.type = 'pi0', but checkpoint = .*pi05 is a 'pi05'"):
        Pi0Settings(checkpoint=str(folder), tokenizer="words", robot="bounds").form(SPEC)
    with pytest.raises(ValueError, match=r"policy.chunk = 6: the network predicts 5 actions"):
        Pi05Settings(checkpoint=str(folder), tokenizer="words", robot="bounds", chunk=6).form(SPEC)


def test_the_state_is_in_the_prompt_of_pi05_unless_switched_off() -> None:
    obs = case("pi05").observations()
    moved = obs | {"proprio": -obs["proprio"]}

    def prompts(**changes: Any) -> bool:
        inputs = case("pi05", **changes).build().inputs
        return torch.equal(inputs(obs)["tokens"], inputs(moved)["tokens"])

    assert not prompts()
    assert prompts(state_in_prompt=False)
