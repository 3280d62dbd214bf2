"""Every policy passes the same checks; a new one is a line in CASES."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from examples.own_policy.bounded import BoundedSettings
from pydantic import BaseModel
from tests.built import built
from torch import Tensor

from polyrhythm.conformance import Note, run_checks
from polyrhythm.plugins.trial import policy_contract as conformance
from polyrhythm.plugins.trial.policy_calls import evaluate_act, sample
from polyrhythm.plugins.trial.policy_contract import check_supervised_training_learns, value_gradient_reach
from polyrhythm.plugins.vla.pi0.settings import Pi0Settings, Pi0SizeSettings, Pi05Settings
from polyrhythm.policies.base import Policy, as_module
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.flow_matching import FlowCps, FlowMethod, FlowNoise, FlowSde, Ode
from polyrhythm.policies.form import Role
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla.heads import FlowMatchingSettings
from polyrhythm.policies.tiny_vla.policy import TinyVlaSettings
from polyrhythm.specs import INSTRUCTION, PROGRESS, ActionSpec, ArraySpec, EnvSpec, Task

ROWS = 12
TASKS = (Task("push", "push the red block"), Task("close", "close the door"), Task("press", "press the button down"))
CONTINUOUS = ActionSpec("continuous", 3, low=(-1.0, 0.0, -5.0), high=(1.0, 4.0, 5.0))
FLAT = {"hand": ArraySpec((3,), "float32"), "joints": ArraySpec((2, 2), "float64")}
PICTURE = {"image": ArraySpec((32, 48, 3), "uint8"), "proprio": ArraySpec((4,), "float32")}


@dataclass(frozen=True)
class Case:
    settings: BaseModel
    spec: EnvSpec

    def build(self, seed: int = 0) -> Policy:
        return built(self.settings, self.spec, seed)

    def observations(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(11)
        obs = {
            name: torch.randint(0, 256, (ROWS, *array.shape), generator=generator).to(getattr(torch, array.dtype))
            if array.dtype == "uint8"
            else torch.randn(ROWS, *array.shape, generator=generator).to(getattr(torch, array.dtype))
            for name, array in self.spec.observation.items()
        }
        obs[INSTRUCTION] = torch.arange(ROWS) % len(self.spec.tasks)
        obs[PROGRESS] = torch.rand(ROWS, generator=generator)
        return obs


def flow(method: FlowMethod, **settings: int) -> Case:
    head = FlowMatchingSettings(method=method, **settings)
    return Case(TinyVlaSettings(head=head), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50))


def pi0(settings: type[Pi0Settings | Pi05Settings]) -> Case:
    size = Pi0SizeSettings(width=32, mlp=48, heads=2, head_dim=16, expert_width=24, expert_mlp=32, image=28)
    policy = settings(size=size, chunk=2, dtype="float32", steps=2, sft_draws=16)
    return Case(policy, EnvSpec(PICTURE, CONTINUOUS, TASKS, 50))


CASES = {
    "gaussian": Case(GaussianSettings(chunk=2), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "gaussian with progress": Case(GaussianSettings(progress=True, layers=1), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "gaussian normalised": Case(GaussianSettings(normalize_observations=True), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "categorical": Case(CategoricalSettings(chunk=3), EnvSpec(FLAT, ActionSpec("discrete", 2, choices=5), TASKS, 50)),
    "categorical of unequal counts": Case(
        CategoricalSettings(chunk=2), EnvSpec(FLAT, ActionSpec("discrete", 3, counts=(5, 2, 1)), TASKS, 50)
    ),
    "own example": Case(BoundedSettings(), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "tiny_vla": Case(TinyVlaSettings(), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)),
    "tiny_vla normalised": Case(TinyVlaSettings(normalize_observations=True), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)),
    "tiny_vla shared value": Case(
        TinyVlaSettings(value_detach=False, chunk=1), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)
    ),
    "tiny_vla flow_sde": flow(FlowSde()),
    "tiny_vla flow_sde in one step": flow(FlowSde(noise=1.0), steps=1),
    "tiny_vla flow_cps in two steps": flow(FlowCps(), steps=2),
    "tiny_vla flow_noise": flow(FlowNoise(), steps=3),
    "tiny_vla ode": flow(Ode()),
    "pi0": pi0(Pi0Settings),
    "pi05": pi0(Pi05Settings),
}
#: Those whose log-prob no parameter moves: for supervised training and evaluation only.
WITHOUT_GRADIENT = {"tiny_vla ode"}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_every_check_passes_without_a_note(case: Case) -> None:
    learns = case not in [CASES[name] for name in WITHOUT_GRADIENT]
    checks = conformance.policy_checks(case.settings, case.observations(), case.spec, learns=learns, imitates=True)
    assert [finding for finding in run_checks(checks) if finding.state != "ok"] == []
    assert len(checks) == 13 + learns


def test_the_trial_before_a_run_passes_with_two_rows_and_with_one(case: Case) -> None:
    policy, obs = case.build(), case.observations()
    state, numbers = copy.deepcopy(policy.state_dict()), torch.get_rng_state()
    for rows in (2, 1):
        conformance.try_policy(policy, {name: array[:rows] for name, array in obs.items()}, case.spec)
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert as_module(policy).training


def test_value_is_bit_equal(case: Case) -> None:
    policy, obs = case.build(), case.observations()
    act = sample(policy, obs)
    if policy.exact:
        assert torch.equal(policy.value(obs), act.value)
        assert torch.equal(evaluate_act(policy, obs, act).value, act.value)


def test_supervised_training_learns(case: Case) -> None:
    demonstrated = sample(case.build(seed=5), case.observations()).actions
    assert not isinstance(check_supervised_training_learns(case.build(), case.observations(), demonstrated), Note)


@pytest.mark.parametrize("name", sorted(WITHOUT_GRADIENT))
def test_a_log_prob_that_nothing_moves_has_no_gradient(name: str) -> None:
    policy, obs = CASES[name].build(), CASES[name].observations()
    evaluation = policy.evaluate(obs, sample(policy, obs).forward_inputs)
    assert not evaluation.logprob.requires_grad
    assert evaluation.value.requires_grad


@pytest.mark.parametrize("name", ["gaussian", "categorical", "tiny_vla", "tiny_vla flow_sde"])
def test_value_loss_stays_out_of_the_policy(name: str) -> None:
    reached = value_gradient_reach(CASES[name].build(), CASES[name].observations())
    assert reached
    assert all(parameter.startswith("critic.") for parameter in reached)


def test_value_loss_enters_the_trunk_when_asked() -> None:
    case = CASES["tiny_vla shared value"]
    reached = value_gradient_reach(case.build(), case.observations())
    assert any(parameter.startswith("trunk.spatial") for parameter in reached)


class ScaledSettings(GaussianSettings):
    """Its policy keeps a scale, as what `kept` says."""

    kept: Literal["plain", "listed", "buffer"]

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Policy:
        policy = super().build(env_spec, seed=seed, device=device, role=role)
        module = as_module(policy)
        if self.kept == "buffer":
            module.register_buffer("scale", torch.ones(3), persistent=False)
            module.also = [module.scale]
        else:
            module.scale = torch.ones(3) if self.kept == "plain" else {"hand": (torch.ones(3),)}
        return policy


@pytest.mark.parametrize(("kept", "name"), [("plain", "scale"), ("listed", "scale['hand'][0]"), ("buffer", "")])
def test_a_tensor_that_would_not_move_with_the_policy_is_a_finding(kept: str, name: str) -> None:
    settings = ScaledSettings(kept=kept)
    checks = conformance.policy_checks(settings, CASES["gaussian"].observations(), CASES["gaussian"].spec)
    found = run_checks({"moves": checks["tensors move with the policy"]})
    said = [finding.detail for finding in found if finding.state != "ok"]
    told = "is a tensor, but neither parameter nor buffer, so it does not move with the policy"
    assert said == ([f"{name} {told}"] if name else [])
