"""GR00T N1.5 as a policy: small ones keep the contract in all variants and train in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.long import long
from tests.pipeline.runs import config
from tests.plugins.trial.test_policy_contract import CONTINUOUS, PICTURE, TASKS, Case

from polyrhythm.config.registry import resolve
from polyrhythm.conformance import run_checks
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import sample
from polyrhythm.plugins.vla.groot_n1d5.network import GrootSettings, GrootSizeSettings
from polyrhythm.specs import INSTRUCTION, EnvSpec, Task

SPEC = EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)
SMALL = {
    "width": 32,
    "mlp": 48,
    "layers": 2,
    "heads": 2,
    "dit_width": 32,
    "dit_layers": 3,
    "hidden": 24,
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
    "bfloat16 flow_noise": {"dtype": "bfloat16", "method": "flow_noise"},
    "a value per action": {"value_level": "action", "value_detach": False},
}


def case(**changes: Any) -> Case:
    section = {"type": "groot_n1d5", "size": SMALL, "chunk": 2, "dtype": "float32", **changes}
    return Case(resolve("policy", section), SPEC)


#: The others are held by those of pi0.
USUAL = ("flow_sde", "expert", "bfloat16 flow_noise")


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in USUAL else long(1, name)) for name in VARIANTS]
)
def test_every_check_passes_without_a_note(variant: str) -> None:
    found = case(**VARIANTS[variant])
    checks = conformance.policy_checks(found.settings, found.observations(), SPEC, learns=True, imitates=True)
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []


@pytest.mark.parametrize("method", [pytest.param("flow_sde", marks=long(1, "flow_sde")), "flow_cps"])
def test_two_updates_of_a_run(method: str, tmp_path: Path) -> None:
    lamps = {"type": "tests.pipeline.pictures:LampSettings"}
    section = {"type": "groot_n1d5", "size": SMALL, "state": "left", "chunk": 2, "dtype": "float32", "steps": 2}
    run = config(env=lamps, policy=section | {"method": method}, training={"versions": 2})
    summary = train(validate_run(run), tmp_path)
    assert summary["ledger"]["trained"] == 2 * run.training.batch_size
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "train/actor/policy_loss" in line]
    assert len(updates) == 2
    assert all(line["train/actor/grad_norm"] > 0 for line in updates)
    assert all(abs(line["train/actor/mismatch_kl"]) < 1e-6 for line in updates), "generator and trainer agree"


def test_full_size_form_is_made_without_weights() -> None:
    form = resolve("policy", {"type": "groot_n1d5", "size": "released", "train": "expert"}).form(SPEC)
    network = {name for name in form.published if name.startswith("network.")}
    assert form.parameters - 2_413_522_880 < 5_000_000
    assert {name.split(".")[1] for name in network} == {"action_head"}


def test_wrong_settings_are_one_sentence() -> None:
    with pytest.raises(ValidationError, match=r"policy.size.width = 30 is not a multiple of 2 x heads = 8"):
        GrootSettings(size=GrootSizeSettings(width=30))
    with pytest.raises(ValueError, match=r"policy.chunk = 5: the network predicts 3 actions; lower it"):
        GrootSettings(chunk=5, horizon=3).form(SPEC)


WORDS = ("push", "push the red block to the left side", "close the door now")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("train", ["all", "expert"])
def test_actions_do_not_depend_on_the_runs_other_prompts(dtype: str, train: str) -> None:
    """The released head reads padding: a prompt is as alone, whatever others the run has."""
    settings = case(dtype=dtype, train=train).settings
    tasks = tuple(Task(str(i), words) for i, words in enumerate(WORDS))
    both = Case(settings, replace(SPEC, tasks=tasks))
    together, obs = both.build(), both.observations()
    every = sample(together, obs)
    seen = together.evaluate(obs, every.forward_inputs)
    rounding = 1e-4 if dtype == "float32" else 0.1
    lengths = set()
    for index, task in enumerate(tasks):
        alone = Case(settings, replace(SPEC, tasks=(task,))).build()
        lengths.add(alone.inputs(one_task(obs, index))["input_ids"].shape[1])
        rows = obs[INSTRUCTION] == index
        expected = alone.evaluate(one_task(obs, index), {k: x[rows] for k, x in every.forward_inputs.items()})
        assert torch.allclose(seen.logprob[rows], expected.logprob, atol=rounding, rtol=1e-3)
        assert torch.allclose(seen.value[rows], expected.value, atol=rounding)
    assert len(lengths) == len(WORDS), "prompts of several lengths"


def one_task(obs: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """The rows of a task, for a policy that has no other."""
    rows = obs[INSTRUCTION] == index
    return {name: x[rows] for name, x in obs.items()} | {INSTRUCTION: torch.zeros(int(rows.sum()), dtype=torch.int64)}


def test_a_set_length_of_the_prompt_counts_its_padding() -> None:
    """As in a checkpoint that was trained with a fixed number of places."""
    obs = case().observations()
    natural, wide = (case(prompt_length=length).build() for length in (0, 60))
    assert natural.inputs(obs)["visible"].equal(natural.inputs(obs)["attention_mask"])
    given = wide.inputs(obs)
    assert given["visible"].all()
    assert not given["attention_mask"].all()


def test_adapters_alone_learn() -> None:
    found = case(train="lora", lora={"rank": 4, "also": ["action_head.action_decoder.*"]}, sft_draws=32)
    policy, obs = found.build(), found.observations()
    assert isinstance(policy, torch.nn.Module)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(20):
        loss = policy.sft_loss(obs, torch.full((12, 2, 3), 0.5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_frozen_backbone_is_computed_once() -> None:
    found = case(train="expert")
    policy, obs = found.build(), found.observations()
    act = sample(policy, obs)
    ready = {name: array for name, array in obs.items() if name not in PICTURE} | policy.precompute(obs)
    calls: list[int] = []
    policy.network.backbone.register_forward_hook(lambda *_: calls.append(1))
    policy.network.backbone.eagle_model.register_forward_hook(lambda *_: calls.append(1))
    expected = policy.evaluate(obs, act.forward_inputs)
    assert len(calls) == 1
    again = policy.evaluate(ready, act.forward_inputs)
    assert torch.equal(sample(policy, {**obs, **ready}).actions, act.actions)
    assert len(calls) == 1
    assert torch.equal(again.logprob, expected.logprob)
    assert torch.equal(again.value, expected.value)
    again.logprob.sum().backward()
    assert policy.network.action_head.vlln.weight.grad is not None
    assert case().build().precompute(obs) == {}


def counted(module: torch.nn.Module) -> list[int]:
    """Grows by one with each call of the module."""
    calls: list[int] = []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("train", ["all", "expert"])
def test_recomputed_activations_give_equal_gradients(train: str) -> None:
    """Also with a frozen backbone, where the action head alone has activations to keep."""
    plain, again = (case(train=train, gradient_checkpointing=flag) for flag in (False, True))
    obs, gradients = plain.observations(), []
    for found in (plain, again):
        policy = found.build()
        head = policy.network.action_head
        blocks = head.model.transformer_blocks[0], head.vl_self_attention.transformer_blocks[0]
        calls = [counted(block) for block in blocks]
        policy.sft_loss(obs, torch.zeros(12, 2, 3)).backward()
        assert [len(one) for one in calls] == [1 + (found is again)] * 2
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
