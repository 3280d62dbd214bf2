"""Demonstrations: clean labels, noisy execution, holding, unsuccessful ones thrown away."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tests.stations.counting import MAX_STEPS, Counting

from polyrhythm.config.sections.learning import DemonstrationSettings
from polyrhythm.envs.base import RowsFailed
from polyrhythm.envs.gymnasium_env import GymnasiumSettings
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.plugins.demonstrations.recording import demonstrate
from polyrhythm.specs import INSTRUCTION, PROGRESS
from polyrhythm.stations.simulator.slot import StepSettings


class Demonstrable(Counting):
    """Its episodes take `length` steps; the expert's action is the number of steps done, plus 1, in both entries."""

    length = 5

    def __init__(self, rows, **flags):
        super().__init__(rows, **flags)
        self.executed = []

    def reset(self, rows, tasks, seeds):
        super().reset(rows, tasks, [self.length if task == 0 else self.length + 1 for task in tasks])

    def step(self, rows, actions):
        self.executed.append(np.asarray(actions).copy())
        return super().step(rows, actions)


def settings(**changes):
    return DemonstrationSettings.model_validate({"episodes_per_task": 2, **changes})


@pytest.mark.parametrize("flags", [{}, {"step_rows": False}, {"reset_rows": False, "step_rows": False}])
def test_labels_are_what_the_expert_does_when_each_action_begins(flags):
    demonstrations = demonstrate(
        Demonstrable(3, **flags), settings(), StepSettings(chunk=2, action_repeat=2)
    ).demonstrations
    # Task a ends within its second chunk, in the first action's... 5 = 2+2 | 1, so the last label is kept.
    # Task b takes 6 = 2+2 | 2 steps.
    assert len(demonstrations) == 8
    assert demonstrations.obs[INSTRUCTION].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert demonstrations.actions[:, :, 0].tolist() == [[1, 3], [5, 5], [1, 3], [5, 5]] * 2
    assert np.allclose(demonstrations.obs[PROGRESS], [0, 4 / MAX_STEPS] * 4)
    assert demonstrations.obs["x"][:, 1].tolist() == [0, 4] * 4


def test_every_second_episode_is_executed_with_noise_and_labelled_without():
    env = Demonstrable(1)
    demonstrations = demonstrate(env, settings(noise_std=0.5), StepSettings(chunk=1)).demonstrations
    assert demonstrations.actions[:5, 0, 0].tolist() == [1, 2, 3, 4, 5]
    executed = np.concatenate(env.executed)[:, 0]
    assert executed[:5].tolist() == [1, 2, 3, 4, 5]
    assert not np.allclose(executed[5:10], [1, 2, 3, 4, 5])
    assert demonstrations.actions[5:10, 0, 0].tolist() == [1, 2, 3, 4, 5]
    again = Demonstrable(2)
    demonstrate(again, settings(noise_std=0.5), StepSettings(chunk=1))
    assert np.allclose([step[1, 0] for step in again.executed[:5]], executed[5:10]), "noise is the episode's own"


def test_an_expert_that_never_succeeds_is_an_error():
    env = Demonstrable(2)
    env.length = MAX_STEPS + 5
    with pytest.raises(RunHalted, match=r"never succeeded at a .*; correct the environment or its expert$"):
        demonstrate(env, settings(), StepSettings(chunk=1))
    with pytest.raises(RunHalted, match=r"its expert, or lower demonstrations.noise_std \(0.5\)$"):
        demonstrate(env, settings(noise_std=0.5), StepSettings(chunk=1))


def test_an_environment_without_an_expert_is_refused():
    env = GymnasiumSettings(id="CartPole-v1").build(1)
    with pytest.raises(ConfigError, match="no scripted expert"):
        demonstrate(env, settings(), StepSettings(chunk=1))
    env.close()


class Diverging(Demonstrable):
    """From step `since` on, rows from `first` on show or do what is not finite."""

    def __init__(self, rows, *, shown=0.0, done=0.0, first=1, since=2, **flags):
        super().__init__(rows, **flags)
        self.shown, self.done, self.first, self.since = shown, done, first, since
        self.discarded = []

    def discard(self, row):
        self.discarded.append(row)

    def _gone(self, rows):
        return (np.asarray(rows) >= self.first) & (self.state[np.asarray(rows), 1] >= self.since)

    def observe(self, rows, out):
        super().observe(rows, out)
        out["x"][: len(rows), 2] += np.where(self._gone(rows), self.shown, 0.0)

    def expert_actions(self, rows):
        return super().expert_actions(rows) + np.where(self._gone(rows), self.done, 0.0)[:, None]


@pytest.mark.parametrize("flags", [{}, {"step_rows": False}, {"reset_rows": False, "step_rows": False}])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"shown": np.inf}, r"observation x is not finite \(task a, seed \d+, env step 2\)"),
        ({"done": np.nan}, r"the expert's action is not finite \(task a, seed \d+, env step 2\)"),
    ],
)
def test_an_episode_that_is_not_finite_is_dropped(wrong, words, flags, caplog):
    env = Diverging(2, **wrong, **flags)
    found = demonstrate(env, settings(noise_std=0.5), StepSettings(chunk=1)).demonstrations
    assert len(found) == 5 + 6, "the first episode of each task"
    assert np.isfinite(found.obs["x"]).all()
    assert np.isfinite(found.actions).all()
    assert np.isfinite(np.concatenate(env.executed)).all()
    assert env.discarded == ([1, 1] if "shown" in wrong else []), "what the environment keeps of the row"
    assert re.search("1 episodes were dropped, the first since " + words, caplog.text)


def test_an_expert_whose_episodes_are_all_dropped_is_an_error():
    env = Diverging(2, shown=np.nan, first=0, since=0)
    with pytest.raises(RunHalted, match=r"never succeeded at a .*observation x is not finite .*; correct the env"):
        demonstrate(env, settings(), StepSettings(chunk=1))


class Falling(Demonstrable):
    """Row `row` fails at env step `at` (-1: at its reset); a row that has failed does so again at each further step."""

    def __init__(self, rows: int, *, row: int = 1, at: int = 2, error: Exception | None = None, **flags: Any) -> None:
        super().__init__(rows, **flags)
        self.row, self.at, self.error = row, at, error or RuntimeError("fell over")

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        super().reset(rows, tasks, seeds)
        if self.at < 0 and self.row in list(rows):
            raise RowsFailed({self.row: self.error})

    def step(self, rows: Any, actions: Any) -> Any:
        result = super().step(rows, actions)
        if self.row in list(rows) and self.state[self.row, 1] > self.at >= 0:
            raise RowsFailed({self.row: self.error}, result)
        return result


@pytest.mark.parametrize("flags", [{}, {"step_rows": False}, {"reset_rows": False, "step_rows": False}])
@pytest.mark.parametrize(("at", "call", "step"), [(-1, "reset", 0), (0, "step", 1), (2, "step", 3)])
def test_an_episode_whose_row_fails_is_dropped_alone(
    at: int, call: str, step: int, flags: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    found = demonstrate(Falling(2, at=at, **flags), settings(noise_std=0.5), StepSettings(chunk=1))
    alone = demonstrate(Demonstrable(2, **flags), settings(), StepSettings(chunk=1)).demonstrations
    first = np.r_[0:5, 10:16]  # the first episode of each task
    assert np.array_equal(found.demonstrations.obs["x"], alone.obs["x"][first])
    assert np.array_equal(found.demonstrations.actions, alone.actions[first])
    assert [(task["successes"], task["episodes"]) for task in found.tasks.values()] == [(1, 2), (1, 2)]
    where = rf"\(task b, seed \d+, env step {step}\)"
    words = f"1 episodes were dropped, the first since the environment failed in {call}: RuntimeError: fell over "
    assert re.search(words + where, caplog.text)


def test_a_row_that_fails_in_no_ops_after_its_episode_costs_nothing() -> None:
    """Task b takes a step more than task a, in which the other row does a no-op and fails."""
    env = Falling(2, row=0, at=5, step_rows=False)
    found = demonstrate(env, settings(episodes_per_task=1), StepSettings(chunk=4)).demonstrations
    assert len(found) == 4


def test_what_no_retry_solves_ends_the_recording() -> None:
    with pytest.raises(ConfigError, match="no camera"):
        demonstrate(Falling(2, error=ConfigError("no camera")), settings(), StepSettings(chunk=1))


def test_a_call_that_fails_for_all_rows_is_one_sentence() -> None:
    env = Demonstrable(2)
    env.broken.add(5)  # of Counting: the whole call raises
    words = r"the environment failed while demonstrations were recorded: step: RuntimeError: row 0 fell over.*; correct"
    with pytest.raises(RunHalted, match=words):
        demonstrate(env, settings(), StepSettings(chunk=1))
