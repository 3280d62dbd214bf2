"""Spaces, infos and errors of the Gymnasium adapter; the contract itself is in test_contract."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text

from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.errors import ConfigError
from polyrhythm.specs import ArraySpec


class Recorder(gymnasium.Env[Any, Any]):
    """Echoes: remembers the actions it got; ends with success at the third step."""

    def __init__(
        self, action_space: gymnasium.Space[Any], observation_space: gymnasium.Space[Any] | None = None
    ) -> None:
        self.action_space = action_space
        self.observation_space = observation_space or Box(0, 1, (2,), np.float64)
        self.got: list[Any] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.got.append(action)
        done = len(self.got) == 3
        return self.observation_space.sample(), 1.0, done, False, {"is_success": done}


@pytest.fixture(autouse=True, scope="module")
def recorder():
    gymnasium.register("polyrhythm-test/Recorder-v0", Recorder)
    yield
    gymnasium.registry.pop("polyrhythm-test/Recorder-v0")


def settings(max_steps: int = 10, **kwargs: Any) -> GymnasiumSettings:
    return GymnasiumSettings(id="polyrhythm-test/Recorder-v0", max_steps=max_steps, kwargs=kwargs)


def received(batch: Any) -> Any:
    return batch._envs[0].unwrapped.got[-1]


def test_discrete_actions_start_where_the_space_starts():
    batch = settings(action_space=Discrete(3, start=5)).build(1)
    assert (batch.spec.action.kind, batch.spec.action.dim, batch.spec.action.choices) == ("discrete", 1, 3)
    batch.reset([0], [0], [0])
    batch.step([0], np.array([[2]]))
    assert received(batch) == 7
    assert type(received(batch)) is int


def test_box_actions_are_flattened_and_restored():
    batch = settings(
        action_space=Box(np.array([[-1, -2], [-3, -4]]), np.array([[1, 2], [3, 4]]), dtype=np.float64)
    ).build(1)
    assert batch.spec.action.low == (-1, -2, -3, -4)
    batch.reset([0], [0], [0])
    batch.step([0], np.array([[1, 2, 3, 4]], np.float32))
    assert received(batch).tolist() == [[1, 2], [3, 4]]
    assert received(batch).dtype == np.float64


def test_multi_discrete_actions_need_equal_counts():
    assert settings(action_space=MultiDiscrete([4, 4])).spec().action.choices == 4
    with pytest.raises(ConfigError, match="MultiDiscrete of equal counts"):
        settings(action_space=MultiDiscrete([4, 3])).spec()


def test_dict_observations_get_dotted_keys():
    space = Dict({"hand": Dict({"pos": Box(0, 1, (3,), np.float64)}), "image": Box(0, 255, (4, 4, 3), np.uint8)})
    batch = settings(action_space=Discrete(2), observation_space=space).build(2)
    assert batch.spec.observation == {
        "hand.pos": ArraySpec((3,), "float32"),
        "image": ArraySpec((4, 4, 3), "uint8"),
    }
    batch.reset([0, 1], [0, 0], [1, 2])
    out = {key: np.zeros((2, *spec.shape), spec.dtype) for key, spec in batch.spec.observation.items()}
    batch.observe([0, 1], out)
    assert all(part[0].any() and not np.array_equal(part[0], part[1]) for part in out.values())


def test_success_comes_from_the_info():
    batch = settings(action_space=Discrete(2)).build(1)
    batch.reset([0], [0], [0])
    results = [batch.step([0], np.array([[0]])) for _ in range(3)]
    assert [bool(r.success[0]) for r in results] == [False, False, True]
    assert [bool(r.terminated[0]) for r in results] == [False, False, True]


def test_the_registered_limit_is_the_default():
    assert GymnasiumSettings(id="CartPole-v1").spec().max_steps == 500


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (GymnasiumSettings(id="CartPol-v1"), "the nearest is CartPole-v1"),
        (GymnasiumSettings(id="CartPole-v99"), "the nearest is CartPole-v1"),
        (GymnasiumSettings(id="no_such_module:CartPole-v1"), "No module named 'no_such_module'"),
        (GymnasiumSettings(id="CartPole-v1", kwargs={"colour": "red"}), "cannot be made with kwargs {'colour': 'red'}"),
        (settings(0, action_space=Discrete(2)), "registers no time limit; set max_steps above 0"),
        (settings(action_space=Text(3)), "wrap them into a float Box"),
        (settings(action_space=Discrete(2), observation_space=Text(3)), "observation state is Text"),
    ],
)
def test_errors_say_what_value_and_remedy(made, said):
    with pytest.raises(ConfigError) as caught:
        made.spec()
    assert said in str(caught.value)
