"""What reset and step of a Gymnasium environment return is compared with its spaces and with Gymnasium's interface."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Dict
from tests.envs.odd_envs import SEEN

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import RowsFailed, first_cause
from polyrhythm.envs.gymnasium_spaces import Observations
from polyrhythm.errors import ConfigError

WAYS = {"alone": {"type": "gymnasium"}, "sync": {"type": "gymnasium_vector"}}
ID = "tests.envs.odd_envs:Odd-v0"


def batch_of(way: str, rows: int = 2, env_id: str = ID, **kwargs: Any) -> Any:
    others = {name: kwargs.pop(name) for name in ("wrappers", "python", "mode") if name in kwargs}
    return resolve("env", {**WAYS[way], "id": env_id, "kwargs": kwargs, **others}).build(rows)


def episode(batch: Any) -> tuple[Any, dict[str, Any]]:
    """One step of all rows, and what is observed then."""
    rows = range(batch.rows)
    out = {name: np.zeros((batch.rows, *a.shape), a.dtype) for name, a in batch.spec.observation.items()}
    try:
        batch.reset(rows, [0] * batch.rows, [*rows])
        batch.observe(rows, out)
        result = batch.step(rows, np.zeros((batch.rows, batch.spec.action.dim), np.int64))
        batch.observe(rows, out)
    except RowsFailed as failed:
        raise first_cause(failed) from failed
    finally:
        batch.close()
    return result, out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["first", "later"])
@pytest.mark.parametrize(
    ("space", "seen", "said"),
    [
        ("three", np.zeros(1, np.float32), r"observation state has shape \[1\], its space declares shape \[3\]"),
        ("three", 0.5, r"observation state has shape \[\], its space declares shape \[3\]"),
        ("three", np.zeros((3, 1), np.float32), r"has shape \[3, 1\], its space declares shape \[3\]"),
        ("three", [[1], [2, 3]], "observation state is .*, no array, its space declares float32 \\[3\\]"),
        ("three", np.array(["a", "b", "c"]), "observation state is <U1, its space declares float32"),
        ("picture", np.full((2, 2), 0.5), r"observation state is float64, its space declares uint8 \[2, 2\]"),
        ("picture", np.full((2, 2), 300), "has 300, which uint8 cannot hold, its space declares uint8"),
        ("picture", np.full((2, 2), -1), "has -1, which uint8 cannot hold"),
        ("picture", np.zeros((2, 2, 1), np.uint8), r"has shape \[2, 2, 1\]"),
        ("counts", np.array([0.7, 0.2]), r"is float64, its space declares int32 \[2\]"),
        ("counts", np.array([2**40, 0]), f"has {2**40}, which int32 cannot hold"),
        ("discrete", np.array([3]), r"has shape \[1\], its space declares shape \[\]"),
        ("discrete", 5, "has the value 5, its space declares 2 to 4"),
        ("discrete", 1.0, "is float64, its space declares int64"),
        ("many", np.array([3, 0]), r"has the value 3, its space declares \[2, 3\] values from \[1, -1\] on"),
        ("nested", {"arm": {"x": np.zeros(1)}}, "the observation has the keys arm, its space declares arm, mode"),
        ("nested", {**SEEN["nested"], "more": 1}, "the observation has the keys arm, mode, more, its space declares"),
        ("nested", {"arm": np.zeros(1), "mode": 0}, "observation arm is ndarray, its space declares a Dict of x"),
        ("nested", {"arm": {"x": 0.5}, "mode": 0}, r"observation arm.x has shape \[\], its space declares shape \[1\]"),
        ("tuple", (1,), "the observation is tuple of 1, its space declares a Tuple of 2"),
        ("tuple", (0, np.zeros(1)), r"observation 1 has shape \[1\], its space declares shape \[2\]"),
    ],
)
def test_an_observation_unlike_its_space_is_one_sentence(way: str, call: str, space: str, seen: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.id = {ID}: .*{said}.*; return it as declared") as refusal:
        episode(batch_of(way, space=space, **{call: seen}))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("space", "seen", "wanted"),
    [
        ("three", [1, 2, 3], [1, 2, 3]),
        ("three", np.arange(3, dtype=np.float64), [0, 1, 2]),
        ("picture", np.full((2, 2), 200), [[200, 200], [200, 200]]),
        ("counts", np.array([True, False]), [1, 0]),
        ("flags", np.array([True, False]), [1, 0]),
    ],
)
def test_numbers_that_a_space_holds_are_taken_in_any_type(way: str, space: str, seen: Any, wanted: Any) -> None:
    out = episode(batch_of(way, space=space, later=seen))[1]
    assert out["state"].tolist() == [wanted, wanted]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("space", "seen", "wanted"),
    [
        ("discrete", 4, {"state": [0, 0, 1]}),
        ("discrete", np.int64(2), {"state": [1, 0, 0]}),
        ("many", np.array([2, 0]), {"state": [0, 1, 0, 1, 0]}),
        ("nested", {"arm": {"x": np.ones(1)}, "mode": 1}, {"arm.x": [1], "mode": [0, 1]}),
        ("tuple", (1, np.ones(2)), {"0": [0, 1], "1": [1, 1]}),
    ],
)
def test_a_choice_is_observed_as_its_one_hot_vector(way: str, space: str, seen: Any, wanted: dict[str, Any]) -> None:
    batch = batch_of(way, space=space, later=seen)
    assert {name: len(entries) for name, entries in wanted.items()} == {
        name: a.shape[0] for name, a in batch.spec.observation.items()
    }
    assert {name: a[1].astype(int).tolist() for name, a in episode(batch)[1].items()} == wanted


@pytest.mark.parametrize("way", WAYS)
def test_a_choice_among_too_many_for_a_vector_is_refused(way: str) -> None:
    with pytest.raises(ConfigError, match=r"a one-hot vector of 1,000,000 entries, above 16,384; wrap it into"):
        batch_of(way, space="huge")


def test_a_space_without_arrays_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^env.id = x: no observation is left; policies need one$"):
        Observations(Dict({}), "env.id = x")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("given", "reward", "terminated", "truncated"),
    [
        ({"reward": np.array([0.25], np.float32)}, 0.25, False, False),
        ({"reward": np.array(0.25)}, 0.25, False, False),
        ({"reward": [1]}, 1.0, False, False),
        ({"reward": True, "terminated": np.array([True])}, 1.0, True, False),
        ({"terminated": 1}, 0.5, True, False),
        ({"truncated": np.array([True])}, 0.5, False, True),
        ({"truncated": np.True_, "terminated": np.False_}, 0.5, False, True),
        ({"terminated": True, "truncated": True}, 0.5, True, False),
    ],
)
def test_one_number_and_one_flag_are_taken_in_any_form(
    way: str, given: dict[str, Any], reward: float, terminated: bool, truncated: bool
) -> None:
    result = episode(batch_of(way, **given))[0]
    assert (result.reward.tolist(), result.reward.dtype) == ([reward] * 2, np.float32)
    assert (result.terminated.tolist(), result.truncated.tolist()) == ([terminated] * 2, [truncated] * 2)


STATE = np.zeros(3, np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward": None}, "step returned reward = None; return one number"),
        ({"reward": "0.5"}, "step returned reward = '0.5'; return one number"),
        ({"reward": np.ones(2)}, r"step returned reward = array\(\[1., 1.\]\); return one number"),
        ({"reward": np.ones((1, 1))}, r"step returned reward = array\(\[\[1.\]\]\); return one number"),
        ({"terminated": None}, "step returned terminated = None; return True or False"),
        ({"terminated": "False"}, "step returned terminated = 'False'; return True or False"),
        ({"truncated": 2}, "step returned truncated = 2; return True or False"),
        ({"truncated": np.zeros(2, bool)}, "step returned truncated = array.*; return True or False"),
        ({"whole_step": (STATE, 0.5, False, {})}, r"step returned 4 values: .*; return \(observation, reward, termin"),
        ({"whole_step": STATE}, "step returned array.*; return .observation, reward"),
        ({"whole_step": None}, "step returned None; return .observation, reward"),
        ({"whole_step": (STATE, 0.5, False, False, "won")}, "step returned 5 values: .*; return .observation, rew"),
        ({"whole_reset": STATE}, r"reset returned array.*; return \(observation, info\), not the form of the old gym"),
        ({"whole_reset": np.zeros(2, np.float32)}, "reset returned array.*; return .observation, info"),
        ({"whole_reset": (STATE, STATE)}, "reset returned 2 values: .*; return .observation, info"),
    ],
)
def test_another_form_is_refused_with_what_was_returned(way: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.id = {ID}: {said}") as refusal:
        episode(batch_of(way, **given))
    assert "polyrhythm/" not in str(refusal.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_reset_without_a_seed_is_refused_before_it_is_called(way: str) -> None:
    with pytest.raises(ConfigError, match=r"OldGym-v0: its reset does not take seed and options, as in the old gym"):
        batch_of(way, env_id="tests.envs.odd_envs:OldGym-v0")


def test_what_a_wrapper_returns_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=rf"^env\.id = {ID} in its wrappers: step returned 4 values"):
        episode(batch_of("alone", wrappers=["tests.envs.odd_envs:Unwrapping"]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium warns of the error of a process before it raises it
def test_what_a_process_or_another_python_returns_is_checked_too() -> None:
    for way, others in (("sync", {"mode": "async"}), ("alone", {"python": sys.executable})):
        with pytest.raises(ConfigError, match=r"step returned reward = '0.5'; return one number"):
            episode(batch_of(way, reward="0.5", **others))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reward": [0.5]}, r"step returned reward as float64 \[1\]; return one number or flag for each of its 2 rows"),
        ({"reward": ["much", "more"]}, r"step returned reward as <U4 \[2\]; return one number"),
        ({"terminated": [0, 2]}, r"step returned terminated = \[0, 2\]; return True or False for each"),
        ({"state": np.zeros((1, 3))}, r"observation state has shape \[1, 3\], its space declares shape \[2, 3\]"),
        ({"state": np.full((2, 3), "x")}, "observation state is <U1, its space declares float32"),
        ({"four": True}, "step returned tuple of 4; return a tuple of 5, as gymnasium.vector.VectorEnv says"),
    ],
)
def test_a_vector_environment_of_ones_own_is_checked_too(given: dict[str, Any], said: str) -> None:
    section = {"type": "gymnasium_vector", "make": "tests.envs.odd_envs:together", "max_steps": 4, "kwargs": given}
    with pytest.raises(ConfigError, match=rf"^env\.make = tests\.envs\.odd_envs:together: {said}"):
        episode(resolve("env", section).build(2))


def test_a_column_of_rewards_is_one_number_for_each_row() -> None:
    kwargs = {"reward": [[0.5], [0.25]], "terminated": np.array([[True], [False]])}
    section = {"type": "gymnasium_vector", "make": "tests.envs.odd_envs:together", "max_steps": 4, "kwargs": kwargs}
    result = episode(resolve("env", section).build(2))[0]
    assert (result.reward.tolist(), result.terminated.tolist()) == ([0.5, 0.25], [True, False])


@pytest.mark.parametrize("way", WAYS)
def test_seeds_of_a_run_fit_a_library_that_takes_31_bits(way: str) -> None:
    batch = batch_of(way, env_id="tests.envs.odd_envs:Seeded-v0")
    out = {"state": np.zeros((2, 3), np.float32)}
    for seeds in ((2**63 - 1, 2**62), (2**62 - 1, 2**31), (2**30, 3)):
        batch.reset([0, 1], [0, 0], seeds)
        batch.observe([0, 1], out)
        assert not np.array_equal(*out["state"])
    batch.close()
