"""`FlowPolicy` passes the checks of every policy, with each method, and keeps what the design promises."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from tests.plugins.vla.flow_case import CHUNK, DIMS, HORIZON, PADDED, SPEC, SmallFlowSettings, observations
from torch import Tensor

from polyrhythm.conformance import run_checks
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import sample, take_rows
from polyrhythm.plugins.trial.policy_contract import value_gradient_reach
from polyrhythm.plugins.vla.flow_policy import FlowPolicy
from polyrhythm.policies.flow_matching import FlowCps, FlowNoise, FlowSde, Ode
from polyrhythm.runtime.memory.prefixes import frozen_checksum, row_specs
from polyrhythm.specs import PROGRESS

ROWS = 6
CASES = {
    "pi0 flow_sde": SmallFlowSettings(method=FlowSde()),
    "pi0 flow_cps": SmallFlowSettings(method=FlowCps()),
    "pi0 flow_noise": SmallFlowSettings(method=FlowNoise()),
    "pi0 ode": SmallFlowSettings(method=Ode()),
    "pi05 flow_sde": SmallFlowSettings(method=FlowSde(), adaptive=True),
    "pi05 flow_noise, shared value": SmallFlowSettings(
        method=FlowNoise(), adaptive=True, value_detach=False, sft_draws=3
    ),
    "pi0 expert alone": SmallFlowSettings(method=FlowSde(), train="expert"),
}


def built(settings: SmallFlowSettings, seed: int = 0) -> FlowPolicy:
    return settings.build(SPEC, seed=seed, device="cpu", role="train")


@pytest.mark.parametrize("name", CASES)
def test_every_check_passes_without_a_note(name: str) -> None:
    settings = CASES[name]
    checks = conformance.policy_checks(settings, observations(ROWS), SPEC, learns="ode" not in name, imitates=True)
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []


@pytest.mark.parametrize("name", CASES)
def test_supervised_training_learns(name: str) -> None:
    settings = CASES[name].model_copy(update={"sft_draws": 8})
    demonstrated = sample(built(settings, 5), observations(ROWS)).actions
    policy = built(settings)
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(30):
        loss = policy.sft_loss(observations(ROWS), demonstrated)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("name", ["pi0 flow_sde", "pi0 flow_cps", "pi0 flow_noise"])
def test_the_recorded_log_prob_is_that_of_a_pass_of_its_own(name: str) -> None:
    policy, obs = built(CASES[name]), observations(ROWS)
    act = sample(policy, obs)
    calls: list[int] = []
    policy.network.action_out_proj.register_forward_hook(lambda *_: calls.append(1))
    again = sample(policy, obs)
    assert len(calls) == CASES[name].steps
    assert torch.equal(again.logprob, act.logprob)
    assert torch.allclose(policy.evaluate(obs, act.forward_inputs).logprob, act.logprob, atol=1e-5)


def test_the_supervised_loss_is_the_released_one() -> None:
    """By hand: x_t and the target from the draws, the mean over the chunk's actions with all padded entries."""
    policy, obs = built(CASES["pi0 flow_sde"]), observations(ROWS)
    actions = sample(policy, obs).actions
    t, noise = policy.supervised_draws(actions)
    wanted = policy.inputs.normalised_actions(actions, obs)
    data = torch.zeros(ROWS, HORIZON, PADDED)
    for entry, place in enumerate(DIMS):
        data[:, :CHUNK, place] = wanted[..., entry]
    data[:, CHUNK:] = data[:, CHUNK - 1 : CHUNK]
    given = policy.inputs(obs)
    x = t.view(-1, 1, 1) * noise + (1 - t.view(-1, 1, 1)) * data
    v, _ = policy.network.velocity(policy.network.prefix(given), given, x, t)
    expected = (v - (noise - data))[:, :CHUNK].square().mean()
    assert torch.allclose(policy.sft_loss(obs, actions), expected)


def test_times_are_of_the_released_distribution() -> None:
    policy = built(SmallFlowSettings(method=FlowSde(), sft_draws=4))
    actions = torch.randn(4000, CHUNK, len(DIMS), generator=torch.Generator().manual_seed(3))
    t, noise = policy.supervised_draws(actions)
    scaled = (t - 0.001) / 0.999
    assert t.min().item() > 0.001
    assert t.max().item() < 1.0
    assert scaled.mean().item() == pytest.approx(1.5 / 2.5, abs=3e-3)
    assert scaled.var().item() == pytest.approx(1.5 / (2.5**2 * 3.5), abs=3e-3)
    assert noise.std().item() == pytest.approx(1.0, abs=0.01)


def test_draws_change_with_the_weights_and_with_nothing_else() -> None:
    policy, obs = built(CASES["pi0 expert alone"]), observations(ROWS)
    actions = sample(policy, obs).actions
    first = policy.sft_loss(obs, actions)
    assert torch.equal(policy.sft_loss(obs, actions), first)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        other.network.action_time_mlp_out.bias[0] += 1e-6
    assert not torch.equal(other.supervised_draws(actions)[0], policy.supervised_draws(actions)[0])


def computed(policy: FlowPolicy, obs: Mapping[str, Tensor], inputs: dict[str, Tensor]) -> list[Tensor]:
    evaluation = policy.evaluate(obs, inputs)
    return [evaluation.logprob, evaluation.value, policy.value(obs)]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_frozen_prefix_is_computed_once(adaptive: bool) -> None:
    settings = SmallFlowSettings(method=FlowSde(), adaptive=adaptive, train="expert")
    policy, obs = built(settings), observations(ROWS)
    act = sample(policy, obs)
    ready = {name: array for name, array in obs.items() if name != "image"} | policy.precompute(obs)
    assert all(len(array) == ROWS for array in ready.values())
    assert not any(array.requires_grad for array in ready.values())
    expected = computed(policy, obs, act.forward_inputs)
    calls: list[int] = []
    policy.network.paligemma_with_expert.paligemma.model.language_model.layers[0].register_forward_hook(
        lambda *_: calls.append(1)
    )
    assert all(map(torch.equal, computed(policy, ready, act.forward_inputs), expected))
    policy.sft_loss(ready, act.actions).backward()
    assert torch.equal(sample(policy, {**obs, **ready}).actions, act.actions)
    assert calls == []
    order = torch.tensor([3, 1])
    part = computed(policy, take_rows(ready, order), take_rows(act.forward_inputs, order))
    assert all(torch.allclose(x, y[order], atol=1e-5) for x, y in zip(part, expected, strict=True))


@pytest.mark.parametrize("bfloat16", [False, True])
def test_generator_and_trainer_compute_the_same_prefix(bfloat16: bool) -> None:
    settings = SmallFlowSettings(method=FlowSde(), train="expert", bfloat16=bfloat16)
    acting, training = (settings.build(SPEC, seed=0, device="cpu", role=role) for role in ("act", "train"))
    published = settings.form(SPEC).published
    assert frozen_checksum(acting, published) == frozen_checksum(training, published)
    assert frozen_checksum(settings.build(SPEC, seed=1, device="cpu", role="act"), published) != frozen_checksum(
        training, published
    )
    obs = observations(ROWS)
    found, expected = acting.precompute(obs), training.precompute(obs)
    assert row_specs(found) == row_specs(expected)
    assert all(torch.equal(x, expected[name]) for name, x in found.items())


def test_a_trained_prefix_is_not_stored() -> None:
    assert built(CASES["pi0 flow_sde"]).precompute(observations(2)) == {}


def test_value_loss_stays_out_of_the_network_unless_asked() -> None:
    reached = value_gradient_reach(built(CASES["pi0 flow_sde"]), observations(ROWS))
    assert reached
    assert all(name.startswith("critic.") for name in reached)
    shared = value_gradient_reach(built(CASES["pi05 flow_noise, shared value"]), observations(ROWS))
    assert "network.paligemma_with_expert.paligemma.model.language_model.norm.weight" in shared


def test_float32_parts_with_a_bfloat16_backbone() -> None:
    settings = SmallFlowSettings(method=FlowNoise(), bfloat16=True)
    policy, obs = settings.build(SPEC, seed=0, device="cpu", role="act"), observations(ROWS)
    given = policy.inputs(obs)
    with policy.precision.computing("cpu"):
        prefix = policy.network.prefix(given)
        suffix, _ = policy.network.embed_suffix(given, torch.zeros(ROWS, HORIZON, PADDED), torch.ones(ROWS))
        v, features = policy.network.velocity(prefix, given, torch.zeros(ROWS, HORIZON, PADDED), torch.ones(ROWS))
    assert prefix.keys_values[0][0].dtype == torch.bfloat16
    assert {x.dtype for x in (prefix.features, suffix, v, features)} == {torch.float32}
    act, single = sample(policy, obs), sample(built(settings.model_copy(update={"bfloat16": False})), obs)
    assert {act.logprob.dtype, act.value.dtype, act.forward_inputs["chain"].dtype} == {torch.float32}
    assert torch.allclose(act.actions, single.actions, atol=0.2)
    assert not torch.equal(act.actions, single.actions)


def test_a_greedy_row_starts_from_noise_that_changes_in_the_course_of_the_episode() -> None:
    policy, obs = built(CASES["pi0 ode"]), observations(ROWS)
    keys, greedy = torch.arange(ROWS), torch.ones(ROWS, dtype=torch.bool)
    early, late = (
        policy.act({**obs, PROGRESS: torch.full((ROWS,), progress)}, greedy, keys).forward_inputs["start"]
        for progress in (0.1, 0.2)
    )
    assert torch.equal(early, early[:1].expand_as(early))
    assert (early[0] - late[0]).abs().mean() > 0.1
