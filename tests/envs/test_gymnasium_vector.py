"""Vector environments of Gymnasium: in each autoreset mode, episodes are those of separate environments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.process.runs import config

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings
from polyrhythm.errors import ConfigError, EnvLost
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext

ROWS = 5
MAKE = "tests.envs.vector_envs:counting"
RAISED = "tests.envs.vector_envs:Raised"
ALONE = {"type": "gymnasium", "id": "tests.envs.vector_envs:Countdown-v0", "metrics": ["left", "last.action"]}
WAYS: dict[str, dict[str, Any]] = {
    "disabled": {"id": "tests.envs.vector_envs:Countdown-v0"},
    "processes": {"id": "tests.envs.vector_envs:Countdown-v0", "mode": "async"},
    "disabled, made": {"make": MAKE, "kwargs": {"autoreset": "Disabled"}, "max_steps": 50},
    "same step": {"make": MAKE, "kwargs": {"autoreset": "SameStep"}, "max_steps": 50},
    "next step": {"make": MAKE, "kwargs": {"autoreset": "NextStep"}, "max_steps": 50},
    "said by the settings": {
        "make": MAKE,
        "kwargs": {"autoreset": "SameStep", "silent": True},
        "autoreset": "same_step",
        "max_steps": 50,
    },
}


def settings_of(section: dict[str, Any]) -> EnvSettings:
    found = resolve("env", section)
    assert isinstance(found, EnvSettings)
    return found


def vector(way: str, **others: Any) -> EnvSettings:
    return settings_of({"type": "gymnasium_vector", "metrics": ["left", "last.action"], **WAYS[way], **others})


@pytest.fixture(params=list(WAYS))
def batch(request: pytest.FixtureRequest) -> Iterator[EnvBatch]:
    found = vector(request.param).build(ROWS)
    yield found
    found.close()


def observed(batch: EnvBatch, rows: Any) -> dict[str, Any]:
    out = {name: np.zeros((len(rows), *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    batch.observe(rows, out)
    return out


def test_every_episode_is_that_of_an_environment_alone_and_its_end_stays(batch: EnvBatch) -> None:
    """Two episodes of each row, all reset together, as every mode allows; rows end at different steps."""
    alone = settings_of(ALONE).build(ROWS)
    rows, rng = range(ROWS), np.random.default_rng(0)
    assert batch.spec.observation == alone.spec.observation
    assert not batch.spec.step_rows
    for seeds in (range(10, 10 + ROWS), range(2**40, 2**40 + ROWS)):
        batch.reset(rows, [0] * ROWS, [*seeds])
        alone.reset(rows, [0] * ROWS, [*seeds])
        live = np.ones(ROWS, bool)
        lengths = np.zeros(ROWS, int)
        while live.any():
            mine, theirs = observed(batch, rows), observed(alone, rows)
            assert all(np.array_equal(x, theirs[name]) for name, x in mine.items()), lengths
            actions = rng.integers(0, 3, (ROWS, 1))
            found = batch.step(rows, actions)
            expected = alone.step(np.flatnonzero(live), actions[live])
            for name in ("reward", "terminated", "truncated", "success"):
                assert np.array_equal(getattr(found, name)[live], getattr(expected, name)), name
            for name, numbers in expected.metrics.items():
                assert np.array_equal(found.metrics[name][live], numbers), name
            lengths += live
            live[live] = ~(expected.terminated | expected.truncated)
        assert len(set(lengths)) > 1, "rows ended at different steps"
        for name, x in observed(batch, [ROWS - 1, 0]).items():
            assert np.array_equal(x, observed(alone, [ROWS - 1, 0])[name])
    alone.close()


def test_with_autoreset_disabled_a_row_begins_while_the_others_go_on() -> None:
    batch, alone = vector("disabled").build(2), settings_of(ALONE).build(1)
    assert batch.spec.reset_rows
    batch.reset([0, 1], [0, 0], [1, 2])
    for _ in range(12):  # row 0 is left alone, whatever becomes of it
        batch.step([0, 1], np.zeros((2, 1), np.int64))
    before = observed(batch, [0])
    batch.reset([1], [0], [77])
    alone.reset([0], [0], [77])
    assert all(np.array_equal(x, observed(batch, [0])[name]) for name, x in before.items())
    for _ in range(2):
        mine, theirs = observed(batch, [1]), observed(alone, [0])
        assert all(np.array_equal(x, theirs[name]) for name, x in mine.items())
        one = alone.step([0], np.ones((1, 1), np.int64))
        assert batch.step([0, 1], np.ones((2, 1), np.int64)).reward[1] == one.reward[0]
    batch.close()
    alone.close()


@pytest.mark.parametrize("way", ["disabled", "processes"])
def test_rows_without_an_episode_do_not_disturb_the_others(way: str) -> None:
    batch, alone = vector(way).build(4), settings_of(ALONE).build(2)
    for rows, seeds in (([0, 2], [5, 6]), ([2, 3], [7, 8])):
        batch.reset(rows, [0, 0], seeds)
        alone.reset([0, 1], [0, 0], seeds)
        for _ in range(2):
            mine, theirs = observed(batch, rows), observed(alone, [0, 1])
            assert all(np.array_equal(x, theirs[name]) for name, x in mine.items())
            assert np.array_equal(
                batch.step(range(4), np.zeros((4, 1), np.int64)).reward[rows],
                alone.step([0, 1], np.zeros((2, 1), np.int64)).reward,
            )
    batch.close()
    alone.close()


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium warns of the error of a process before it raises it
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_vector_environment_that_raised_is_lost(mode: str) -> None:
    batch = settings_of({"type": "gymnasium_vector", "id": "tests.envs.vector_envs:Fragile-v0", "mode": mode}).build(2)
    batch.reset([0, 1], [0, 0], [1, 2])
    with pytest.raises(EnvLost, match=r"the vector environment raised RuntimeError: .*the solver diverged"):
        batch.step([0, 1], np.array([[2], [0]]))
    batch.close()


@pytest.mark.parametrize("way", ["disabled", "same step", "next step"])
def test_the_time_limit_truncates_and_what_follows_is_not_seen(way: str) -> None:
    batch = vector(way, max_steps=2).build(3)
    batch.reset(range(3), [0] * 3, [4, 5, 6])
    assert not batch.step(range(3), np.zeros((3, 1), np.int64)).truncated.any()
    second = batch.step(range(3), np.zeros((3, 1), np.int64))
    assert (second.truncated | second.terminated).all()
    assert not (second.truncated & second.terminated).any()
    last = observed(batch, range(3))
    batch.step(range(3), np.ones((3, 1), np.int64))
    assert all(np.array_equal(x, observed(batch, range(3))[name]) for name, x in last.items())
    batch.close()


@pytest.mark.parametrize("way", ["disabled", "same step", "next step"])
def test_a_run_trains_on_it(way: str) -> None:
    env = {"type": "gymnasium_vector", **WAYS[way], "max_steps": 20, "rename": {"left": "state"}}
    run = config(
        env=env, launcher="inline", rollout={"segment_steps": 0, "env_batches": 1}, policy={"type": "categorical"}
    )
    pipeline = build_pipeline(RunContext(run))
    try:
        pipeline.loop.train_until(2)
        assert pipeline.loop.conductor.ledger.imbalance == 0
    finally:
        pipeline.close()


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({}, "set either id or make"),
        ({"id": "CartPole-v1", "make": MAKE}, "set either id or make"),
        ({"id": "CartPol-v1"}, "env.id = CartPol-v1: no such Gymnasium environment .* nearest is CartPole-v1"),
        ({"make": "tests.envs.vector_envs:nothing"}, "env.make = .*nothing: it raised AttributeError"),
        ({"make": "tests.envs.vector_envs:too_few", "max_steps": 3}, "it has 2 rows, 1 were asked for by num_envs"),
        ({"make": "tests.envs.vector_envs:no_vector", "max_steps": 3}, "it gave Countdown; return a gymnasium.vector"),
        ({"make": MAKE}, "env.max_steps = 0: .*counting has no time limit"),
        ({"make": MAKE, "kwargs": {"silent": True}, "max_steps": 3}, "does not say what happens .*; set env.autoreset"),
        ({"make": MAKE, "autoreset": "disabled", "max_steps": 3}, "says AutoresetMode.NEXT_STEP; set it to auto"),
        ({"make": MAKE, "kwargs": {"colour": 3}, "max_steps": 3}, "it raised TypeError: .*colour"),
        (
            {"make": MAKE, "wrappers": [RAISED], "max_steps": 3},
            "which the function of make does not make; leave them out",
        ),
        ({"id": "CartPole-v1", "mode": "own", "wrappers": [RAISED]}, "which mode: own does not make; leave them out"),
        ({"id": "CartPole-v1", "wrappers": ["nowhere:No"]}, "env.wrappers.0 = nowhere:No: cannot be imported"),
    ],
)
def test_wrong_settings_are_one_sentence(section: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        settings_of({"type": "gymnasium_vector", **section}).spec()


@pytest.mark.parametrize("way", ["disabled", "processes"])
def test_wrappers_are_applied_to_the_environment_of_each_row_in_order(way: str) -> None:
    batch = vector(way, wrappers=[RAISED, {"apply": RAISED, "kwargs": {"times": 5}}]).build(2)
    alone = settings_of(ALONE).build(2)
    for one in (batch, alone):
        one.reset([0, 1], [0, 0], [1, 2])
    rewards = [one.step([0, 1], np.ones((2, 1), np.int64)).reward for one in (batch, alone)]
    batch.close()
    assert rewards[1].all()
    assert np.array_equal(rewards[0], 10 * rewards[1])


def test_info_that_is_no_number_of_each_row_is_refused() -> None:
    batch = vector("next step", metrics={"success": "last"}).build(2)
    batch.reset([0, 1], [0, 0], [1, 2])
    assert batch.step([0, 1], np.zeros((2, 1), np.int64)).metrics["success"].shape == (2,)
    batch.close()
