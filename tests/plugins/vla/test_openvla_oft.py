"""OpenVLA-OFT: released names and sizes, tokens, and the small one as a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.built import built
from tests.pipeline.pictures import LampSettings
from tests.pipeline.runs import config
from tests.plugins.pretrained.released import without_numbers
from tests.plugins.vla.parity_preprocess import rows_of_ids
from torch import Tensor

import polyrhythm
from polyrhythm.conformance import run_checks
from polyrhythm.pipeline.validation.fit import learns_from_rewards
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import sample
from polyrhythm.plugins.trial.policy_contract import check_supervised_training_learns
from polyrhythm.plugins.vla.openvla_oft.network import (
    L1HeadSize,
    OpenVlaOft,
    OpenVlaOftSize,
    dead_patterns,
    size_from_config,
)
from polyrhythm.plugins.vla.openvla_oft.policy import (
    FEATURES,
    HIDDEN,
    OftSizeSettings,
    OpenVlaOftSettings,
    TokenDistribution,
    ValueHead,
    centres,
    rows_of,
)
from polyrhythm.policies.form import weights_on_meta
from polyrhythm.policies.mlp import seeded
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

GOLDEN = Path(__file__).parent / "golden"


def test_the_released_size_has_the_released_names_and_numbers() -> None:
    with weights_on_meta():
        network = OpenVlaOft(size_from_config({}))
    shapes = {name: tuple(x.shape) for name, x in network.state_dict().items()}
    assert (len(shapes), sum(p.numel() for p in network.parameters())) == (982, 7_541_237_184)
    assert without_numbers(shapes) == without_numbers(load_file(GOLDEN / "openvla_oft" / "weights.safetensors"))
    assert shapes["vision_backbone.featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["vision_backbone.fused_featurizer.attn_pool.latent"] == (1, 1, 1152)
    assert shapes["projector.fc1.weight"] == (8704, 2176)
    assert shapes["language_model.model.embed_tokens.weight"] == (32064, 4096)
    assert sum(name.startswith("vision_backbone.featurizer.blocks.") for name in shapes) == 24 * 14
    assert sum(name.startswith("vision_backbone.fused_featurizer.blocks.") for name in shapes) == 27 * 12
    assert sum(name.startswith("language_model.model.layers.") for name in shapes) == 32 * 9


def test_the_released_l1_head_and_proprioception_have_their_sizes() -> None:
    with weights_on_meta():
        network = OpenVlaOft(replace(OpenVlaOftSize(), proprio=8, l1_head=L1HeadSize()))
    for part in ("action_head", "proprio_projector"):
        names = without_numbers(network.get_submodule(part).state_dict())
        assert names == without_numbers(load_file(GOLDEN / "openvla_oft" / f"{part}.safetensors"))
    assert sum(p.numel() for p in network.get_submodule("action_head").parameters()) == 151_117_831
    assert sum(p.numel() for p in network.get_submodule("proprio_projector").parameters()) == 16_818_176


def test_another_vision_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timm_model_ids = \['vit_base'\]"):
        size_from_config({"timm_model_ids": ["vit_base"]})


def test_tokens_encode_and_decode_as_published() -> None:
    folder = GOLDEN / "preprocess"
    given, wanted = np.load(folder / "inputs.npz"), np.load(folder / "outputs.npz")
    first = OpenVlaOftSize().vocabulary.first_action
    rows = rows_of(torch.from_numpy(given["oft_actions"]), 256)
    assert (rows + first).tolist() == wanted["oft_action_token_ids"].tolist()
    decoded = centres(256, torch.float64)[rows_of_ids(torch.from_numpy(given["oft_token_ids"]), first, 256)]
    np.testing.assert_allclose(decoded.numpy(), wanted["f64_oft_decoded_actions"], rtol=0, atol=1e-15)


def test_an_action_is_decoded_within_half_an_interval() -> None:
    actions = torch.linspace(-1.0, 1.0, 1001, dtype=torch.float64)
    assert (centres(256, torch.float64)[rows_of(actions, 256)] - actions).abs().max() <= 1.0 / 255 + 1e-12


SIZE = OftSizeSettings(
    width=32, layers=3, heads=2, mlp=48, vision_width=16, vision_layers=2, vision_heads=2, image=28, words=96, bins=32
)
SPEC = EnvSpec(
    observation={"image": ArraySpec((24, 32, 3), "uint8"), "proprio": ArraySpec((4,), "float32")},
    action=ActionSpec("continuous", 3, low=(-1.0, 0.0, -5.0), high=(1.0, 4.0, 5.0)),
    tasks=(Task("push", "push the red block"), Task("close", "close the door")),
    max_steps=50,
)
CASES: dict[str, dict[str, Any]] = {
    "tokens": {},
    "temperature and top-k": {"temperature": 1.6, "top_k": 5},
    "official": {"variant": "official", "use_proprio": True, "greedy": "mean", "label_sigma": 0.1, "horizon": 3},
    "bfloat16, shared value": {"dtype": "bfloat16", "value_detach": False},
    "a value per action": {"value_level": "action"},
    "a value of its one action": {"value_level": "action", "chunk": 1},
}


def small(**changes: Any) -> OpenVlaOftSettings:
    return OpenVlaOftSettings(**{"chunk": 2, "dtype": "float32", "size": SIZE, **changes})


def observations(rows: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        "image": torch.randint(0, 256, (rows, 24, 32, 3), generator=generator, dtype=torch.uint8),
        "proprio": torch.randn(rows, 4, generator=generator),
        INSTRUCTION: torch.arange(rows) % 2,
        PROGRESS: torch.rand(rows, generator=generator),
    }


@pytest.mark.parametrize("name", CASES)
def test_the_small_one_keeps_the_contract_of_policies(name: str) -> None:
    checks = conformance.policy_checks(small(**CASES[name]), observations(), SPEC, imitates=True)
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []


@torch.no_grad()
def scores_of(policy: Any, obs: Mapping[str, Tensor]) -> Tensor:
    """Of the action's tokens [B,C,A,32], before the temperature."""
    given, network = policy.inputs(obs), policy.network
    hidden = network.hidden(network.patches(network.features(given["pixel_values"])), given)
    return network.language_model.lm_head(hidden)[..., 96:].view(6, 2, 3, 32)


def test_log_probs_are_of_the_scaled_scores_of_the_action_rows_alone() -> None:
    policy, obs = built(small(temperature=1.6), SPEC), observations()
    act = sample(policy, obs)
    scores = scores_of(policy, obs)
    log_p = (scores / 1.6).log_softmax(-1)
    torch.testing.assert_close(act.logprob, log_p.gather(-1, act.forward_inputs["tokens"].unsqueeze(-1)).squeeze(-1))
    greedy = sample(policy, obs, greedy=True)
    assert torch.equal(greedy.forward_inputs["tokens"], scores.argmax(-1))


def test_top_k_draws_from_the_likeliest_and_judges_by_the_same_rows() -> None:
    policy, obs = built(small(top_k=4), SPEC), observations()
    act = sample(policy, obs)
    with torch.no_grad(), seeded(0):
        likeliest = scores_of(policy, obs).topk(4).indices
        assert (likeliest == act.forward_inputs["tokens"].unsqueeze(-1)).any(-1).all()
        assert torch.equal(policy.evaluate(obs, act.forward_inputs).logprob, act.logprob)
        torch.nn.init.normal_(policy.network.language_model.lm_head.weight)  # other rows are the likeliest now
        later = policy.evaluate(obs, act.forward_inputs).logprob
    assert (later.isfinite() & (later < 0)).all()
    assert not torch.allclose(later, act.logprob, atol=0.1)


def test_the_greedy_token_is_the_likeliest_or_the_one_nearest_to_the_expectation() -> None:
    log_p = torch.tensor([[0.4, 0.3, 0.3, 0.0]]).log()
    always = torch.ones(1, dtype=torch.bool)
    drawn = [TokenDistribution(log_p, None).sample(torch.tensor([0.5]), always, kind) for kind in ("mode", "mean")]
    assert [row.item() for row in drawn] == [0, 1]
    kept = torch.tensor([[3, 9, 10, 1]], dtype=torch.uint8)  # expectation 6.9
    assert TokenDistribution(log_p, kept).sample(torch.tensor([0.5]), always, "mean").item() == 9


def test_the_l1_head_acts_alike_for_all_keys_and_cannot_learn_from_rewards() -> None:
    settings, obs = small(head="l1", variant="official", use_proprio=True), observations()
    policy = built(settings, SPEC)
    first, other = sample(policy, obs), sample(policy, obs, 99, greedy=True)
    assert torch.equal(first.actions, other.actions)
    assert not learns_from_rewards(SPEC, policy)
    checks = conformance.policy_checks(settings, obs, SPEC, learns=False, imitates=True)
    del checks["other keys, other actions"]
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []
    assert "cannot learn from rewards" in conformance.check_key_matters(policy, observations(1))
    shown = sample(built(settings, SPEC, 5), obs).actions
    assert "in 8 steps" in check_supervised_training_learns(policy, obs, shown)


@pytest.mark.parametrize("changes", [{}, {"label_sigma": 0.1}])
def test_supervised_steps_lower_the_loss_of_tokens(changes: dict[str, Any]) -> None:
    shown = sample(built(small(), SPEC, 5), observations()).actions
    assert "in 8 steps" in check_supervised_training_learns(built(small(**changes), SPEC), observations(), shown)


@pytest.mark.parametrize(("train", "kept"), [("all", None), ("expert", FEATURES), ("head", HIDDEN)])
def test_what_is_precomputed_replaces_the_images(train: str, kept: str | None) -> None:
    policy, obs = built(small(train=train, use_proprio=True), SPEC), observations()
    act, found = sample(policy, obs), policy.precompute(obs)
    assert (kept in found) if kept else (found == {})
    without = {name: array for name, array in obs.items() if name not in ("image", "proprio") or not found}
    again = policy.evaluate({**without, **found}, act.forward_inputs)
    torch.testing.assert_close(again.logprob, act.logprob)
    torch.testing.assert_close(again.value, act.value)
    assert torch.equal(sample(policy, {**obs, **found}).actions, act.actions)


@pytest.mark.parametrize("stop_token", [True, False])
def test_padding_between_images_and_prompt_changes_nothing(stop_token: bool) -> None:
    with seeded(0):
        network = OpenVlaOft(replace(SIZE.network(horizon=2, action_dim=3, state_dim=4), stop_token=stop_token))
        network.initialise()
        images, text = torch.randn(1, 6, 28, 28), torch.tensor([[20, 30, 40, 3]])
    packed = torch.cat((torch.tensor([[1]]), text), dim=1)
    padded = torch.cat((torch.tensor([[1, 0, 0]]), text), dim=1)
    with torch.no_grad():
        patches = network.patches(network.features(images))
        short, long = (
            network.hidden(patches, {"input_ids": ids, "attention_mask": ids != 0}) for ids in (packed, padded)
        )
    torch.testing.assert_close(short, long, rtol=0, atol=2e-6)


@pytest.mark.parametrize("continuous", [True, False])
def test_dead_tensors_are_those_without_a_gradient(continuous: bool) -> None:
    size = replace(SIZE.network(horizon=2, action_dim=3, state_dim=4), l1_head=L1HeadSize(32) if continuous else None)
    network = OpenVlaOft(size)
    ids = torch.tensor([[1, 20, 3]])
    hidden = network.hidden(
        network.patches(network.features(torch.randn(1, 6, 28, 28))), {"input_ids": ids, "attention_mask": ids != 0}
    )
    (network.l1_actions(hidden) if continuous else network.token_logits(hidden)).square().sum().backward()
    untouched = {name for name, p in network.named_parameters() if p.grad is None}
    patterns = dead_patterns(size)
    assert untouched == {n for n, _ in network.named_parameters() if any(fnmatchcase(n, one) for one in patterns)}


def test_a_value_head_of_the_reference_keeps_its_values() -> None:
    head = ValueHead(48, 5)
    stored = load_file(GOLDEN / "openvla_oft" / "value_head.safetensors")
    found = head.load_state_dict({name.removeprefix("value_head."): x for name, x in stored.items()}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["seen.weight"], [])
    hidden = torch.randn(2, 48, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(hidden, torch.ones(2, 5)), head(hidden, torch.zeros(2, 5)))


def test_it_trains_two_updates_from_pixels(tmp_path: Path) -> None:
    run = config(
        env=LampSettings().model_dump(),
        policy=small(state="left").model_dump(),
        rollout={"rows": 4},
        training={"versions": 2, "mini_batch_samples": 4, "minibatch_steps": 16},
    )
    updates: list[Any] = []
    assert polyrhythm.train(run, out=tmp_path / "run", callbacks=updates.append).finished
    assert len(updates) == 2
