"""Every policy passes the same checks; a new one is a line in CASES."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from examples.own_policy.bounded import BoundedSettings
from pydantic import BaseModel
from tests.policies import conformance
from torch import Tensor

from polyrhythm.policies.base import Policy
from polyrhythm.policies.categorical import CategoricalSettings
from polyrhythm.policies.flow_methods import FlowNoiseSettings, FlowSdeSettings, OdeSettings
from polyrhythm.policies.gaussian import GaussianSettings
from polyrhythm.policies.tiny_vla import TinyVlaSettings
from polyrhythm.policies.tiny_vla_flow import FlowMatchingSettings, FlowMethod
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
        return self.settings.build(self.spec, seed)

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


CASES = {
    "gaussian": Case(GaussianSettings(chunk=2), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "gaussian with progress": Case(GaussianSettings(progress=True, layers=1), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "categorical": Case(CategoricalSettings(chunk=3), EnvSpec(FLAT, ActionSpec("discrete", 2, choices=5), TASKS, 50)),
    "own example": Case(BoundedSettings(), EnvSpec(FLAT, CONTINUOUS, TASKS, 50)),
    "tiny_vla": Case(TinyVlaSettings(), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)),
    "tiny_vla shared value": Case(
        TinyVlaSettings(value_detach=False, chunk=1), EnvSpec(PICTURE, CONTINUOUS, TASKS, 50)
    ),
    "tiny_vla flow_sde": flow(FlowSdeSettings()),
    "tiny_vla flow_sde in one step": flow(FlowSdeSettings(noise=1.0), steps=1),
    "tiny_vla flow_noise": flow(FlowNoiseSettings(), steps=3),
    "tiny_vla ode": flow(OdeSettings()),
}
#: Those whose log-prob no parameter moves: for supervised training and evaluation only.
WITHOUT_GRADIENT = {"tiny_vla ode"}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_shapes_and_units(case: Case) -> None:
    conformance.check_shapes_and_units(case.build(), case.observations(), case.spec)


def test_evaluate_agrees_with_act(case: Case) -> None:
    conformance.check_evaluate_agrees_with_act(case.build(), case.observations())


def test_noise_is_the_rows_own(case: Case) -> None:
    conformance.check_noise_is_the_rows_own(case.build(), case.observations())


def test_greedy_ignores_the_key(case: Case) -> None:
    conformance.check_greedy_ignores_the_key(case.build(), case.observations())


@pytest.mark.parametrize("name", sorted(CASES.keys() - WITHOUT_GRADIENT))
def test_gradients_reach_all_parameters(name: str) -> None:
    case = CASES[name]
    conformance.check_gradients_reach_all_parameters(case.build(), case.observations())


def test_seed_decides_the_parameters(case: Case) -> None:
    conformance.check_seed_decides_the_parameters(case.build)


def test_state_round_trip(case: Case) -> None:
    conformance.check_state_round_trip(case.build, case.observations())


def test_supervised_training_learns(case: Case) -> None:
    policy, obs = case.build(), case.observations()
    demonstrated = conformance.sample(case.build(seed=5), obs).actions
    conformance.check_supervised_training_learns(policy, obs, demonstrated)


@pytest.mark.parametrize("name", sorted(WITHOUT_GRADIENT))
def test_a_log_prob_that_nothing_moves_has_no_gradient(name: str) -> None:
    policy, obs = CASES[name].build(), CASES[name].observations()
    evaluation = policy.evaluate(obs, conformance.sample(policy, obs).forward_inputs)
    assert not evaluation.logprob.requires_grad
    assert evaluation.value.requires_grad


@pytest.mark.parametrize("name", ["gaussian", "categorical", "tiny_vla", "tiny_vla flow_sde"])
def test_value_loss_stays_out_of_the_policy(name: str) -> None:
    reached = conformance.value_gradient_reach(CASES[name].build(), CASES[name].observations())
    assert reached
    assert all(parameter.startswith("critic.") for parameter in reached)


def test_value_loss_enters_the_trunk_when_asked() -> None:
    case = CASES["tiny_vla shared value"]
    reached = conformance.value_gradient_reach(case.build(), case.observations())
    assert any(parameter.startswith("trunk.spatial") for parameter in reached)
