"""Success and metrics out of the info of Gymnasium environments, by both adapters alike."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box

from polyrhythm.env_warnings import forget_warnings
from polyrhythm.envs.base import EnvSettings
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.envs.gymnasium_vector import GymnasiumVectorSettings
from polyrhythm.envs.info import InfoReader
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.trial.env_contract import check_contract

ID = "polyrhythm-test/Reporter-v0"
ADAPTERS = (GymnasiumSettings, GymnasiumVectorSettings)


class Reporter(gymnasium.Env[Any, Any]):
    """Two steps; its info is given, that of the second step in `last`."""

    action_space, observation_space = Box(-1, 1, (1,)), Box(-1, 1, (1,))

    def __init__(self, info: dict[str, Any] | None = None, last: dict[str, Any] | None = None) -> None:
        self.info = info or {}
        self.last = self.info if last is None else last

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        done = self.steps == 2
        return np.zeros(1, np.float32), 1.0, done, False, copy.deepcopy(self.last if done else self.info)


@pytest.fixture(autouse=True)
def reporter() -> Iterator[None]:
    gymnasium.register(ID, Reporter, max_episode_steps=9)
    forget_warnings()
    yield
    gymnasium.registry.pop(ID)


def success(settings: EnvSettings) -> list[list[int]]:
    """Of two rows in an episode's two steps."""
    batch = settings.build(2)
    batch.reset([0, 1], [0, 0], [1, 2])
    found = [batch.step([0, 1], np.zeros((2, 1), np.float32)).success.tolist() for _ in range(2)]
    batch.close()
    return found


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"success": True}, 1),
        ({"is_success": np.float32(1.0)}, 1),
        ({"succeed": 1}, 1),
        ({"success": np.False_}, 0),
        ({"success": np.True_}, 1),
        ({"success": np.array([1.0])}, 1),
        ({"success": np.array(True)}, 1),
        ({"success": 0.0, "is_success": True}, 0),
        ({"success": None, "is_success": True}, 1),
        ({"success": 0.7}, 1),
        ({"success": -1}, 0),
        ({"solved": True}, -1),
        ({}, -1),
    ],
    ids=str,
)
def test_success_is_the_first_key_that_is_present(adapter: Any, info: dict[str, Any], expected: int) -> None:
    assert success(adapter(id=ID, kwargs={"info": info})) == [[expected] * 2] * 2


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("key", "info"), [("solved", {"solved": True, "success": False}), ("task.done", {"task": {"done": True}})]
)
def test_a_key_that_is_named_counts_alone(adapter: Any, key: str, info: dict[str, Any]) -> None:
    assert success(adapter(id=ID, kwargs={"info": info}, success=key)) == [[1, 1]] * 2
    assert success(adapter(id=ID, kwargs={"info": info}, success="other")) == [[-1, -1]] * 2


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    "value", [{"task": False}, "yes", np.array([1.0, 0.0]), float("nan"), float("inf"), [], [[1]] * 3]
)
def test_what_is_no_flag_and_no_number_is_refused_with_its_key(adapter: Any, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"env\.success = success: the environment's info has .* neither a bool nor"
    ) as e:
        success(adapter(id=ID, kwargs={"info": {"success": value}}))
    if isinstance(value, dict):
        assert str(e.value).endswith("name another key, such as success.task")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("kwargs", "key", "state", "said"),
    [
        ({"info": {"solved": True}}, "", "note", "the environment does not report success in any step"),
        ({"info": {}}, "", "note", "put success into info, or set env.success=KEY"),
        ({"info": {"success": True}}, "solved", "note", "the environment does not report success"),
        ({"info": {"success": False}}, "", "ok", "reported by success in info"),
        ({"info": {}, "last": {"is_success": True}}, "", "ok", "reported by is_success in info"),
        ({"info": {"task": {"done": 0}}}, "task.done", "ok", "reported by task.done in info"),
    ],
)
def test_the_check_tells_the_key_of_success_or_how_to_report_it(
    adapter: Any, kwargs: dict[str, Any], key: str, state: str, said: str
) -> None:
    settings = adapter(id=ID, kwargs=kwargs, success=key)
    (found,) = [one for one in check_contract(settings, 2, lambda _: None) if one.name == "success"]
    assert found.state == state
    assert said in found.detail


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_success_that_is_reported_at_the_end_only(adapter: Any) -> None:
    assert success(adapter(id=ID, kwargs={"info": {}, "last": {"is_success": True}})) == [[-1, -1], [1, 1]]


@pytest.mark.parametrize(
    "final",
    [
        {"is_success": np.array([True, False]), "_is_success": np.array([True, True])},
        {"is_success": np.array([np.True_, np.False_], object)},
        {"is_success": np.array([[1.0], [0.0]])},
        [{"is_success": True}, {"is_success": False}],
        np.array([{"is_success": 1.0}, {"is_success": 0.0}], object),
        ({"is_success": True}, {"is_success": None, "succeed": False}),
    ],
    ids=lambda final: type(final).__name__,
)
def test_forms_of_final_info(final: Any) -> None:
    reader = InfoReader("", ("speed",))
    info = {"final_info": final, "is_success": np.array([False, True])}  # the latter is of the next episodes
    assert reader.read_rows(info, np.ones(2, bool))[0].tolist() == [1, 0]
    assert reader.read_rows(info, np.zeros(2, bool))[0].tolist() == [0, 1]


def test_rows_that_a_mask_or_a_gap_leaves_out_report_nothing() -> None:
    reader, done = InfoReader("", ("a.b",)), np.ones(2, bool)
    info = {"success": np.array([True, True]), "_success": np.array([True, False])}
    assert reader.read_rows(info, done)[0].tolist() == [1, -1]
    assert reader.read_rows({"final_info": [None, {"success": True}]}, done)[0].tolist() == [-1, 1]
    nested = {"a": {"b": np.array([2.0, 3.0]), "_b": np.array([False, True])}}
    assert np.array_equal(reader.read_rows(nested, done)[1]["a.b"], [np.nan, 3.0], equal_nan=True)
    assert reader.read({"a.b": 4, "final_info": {"success": True}}) == (1, {"a.b": 4.0})


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_misspelt_keys_are_told_once_with_those_that_there_are(adapter: Any, caplog: pytest.LogCaptureFixture) -> None:
    info = {"is_succes": True, "task": {"height": 2.0}}
    settings = adapter(id=ID, kwargs={"info": info}, success="is_success", metrics=["task.heigth", "task.height"])
    success(settings)
    success(settings)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == (
        "env.metrics.task.heigth: the environment's info has no such key; env.success = is_success: the environment's "
        "info has no such key, so it does not report success; in the first episode it had is_succes, task.height; set "
        "the key that you mean, if it is one of them"
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_without_a_report_of_success_the_keys_are_told_if_there_are_any(
    adapter: Any, caplog: pytest.LogCaptureFixture
) -> None:
    success(adapter(id=ID))
    success(adapter(id=ID, kwargs={"info": {"success": False}}))
    assert not caplog.records, "nothing to choose from, and nothing to say"
    success(adapter(id=ID, kwargs={"info": {"x\x1b[31m": 1.0}}))
    (said,) = caplog.messages
    assert said.startswith(
        "env.success: the environment's info has no success, is_success or succeed, so it does not report"
    )
    assert "it had x?[31m; set" in said


def test_a_warning_lists_keys_that_end_like_others(caplog: pytest.LogCaptureFixture) -> None:
    reader = InfoReader("goal", ())
    reader.read_rows({"pos": np.zeros(1), "_pos": np.ones(1, bool), "xpos": np.zeros(1)}, np.zeros(1, bool))
    reader.end_episode()
    assert "it had pos, xpos; set" in caplog.text


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_number_that_is_no_flag_is_told_once(adapter: Any, caplog: pytest.LogCaptureFixture) -> None:
    success(adapter(id=ID, kwargs={"info": {"coverage": 0.5}}, success="coverage"))
    (said,) = caplog.messages
    assert said.endswith("; 0.5 counts as a success, being above 0; name another key if this one is a measure")
