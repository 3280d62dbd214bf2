"""Chunk step of some rows: C primitive actions, each held for several env steps; a row that ends is not stepped
further.

An environment whose spec has a `chunk` takes the C actions in one env step instead (`step_whole`). The environment's
own metrics are aggregated here over env steps, to one number per episode, across segments. Without metrics there is no
`EpisodeMetrics` and no overhead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch, StepResult
from polyrhythm.specs import ActionSpec, Aggregate, EnvSpec

Step = Callable[[NDArray[np.intp], NDArray[Any]], StepResult]


class ChunkResult(NamedTuple):
    """Outcome of a chunk step for n rows.

    rewards [n,C] float32, summed over the env steps of an action; valid [n,C]: the action was executed; steps [n]: env
    steps executed; terminated, truncated [n]; success [n]: 1 if the task was solved at any of the steps, -1 if no step
    reported success.
    """

    rewards: NDArray[np.float32]
    valid: NDArray[np.bool_]
    steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_] | NDArray[np.int8]

    @property
    def nan_rewards(self) -> NDArray[np.intp]:
        """Positions of the rows with a reward of NaN: the only ones that can have failed in their episode
        (`GuardedEnv`). A row whose episode ended earlier in the chunk may have failed later, in a no-op."""
        return np.flatnonzero(np.isnan(self.rewards).any(1))

    def part(self, first: int, stop: int) -> ChunkResult:
        return ChunkResult(*(array[first:stop] for array in self))  # type: ignore[arg-type]


def step_chunk(
    step: Step, rows: NDArray[np.intp], actions: NDArray[Any], hold: int, left: NDArray[np.int64] | None
) -> ChunkResult:
    """Execute actions [n,C,A] in the n env rows, each action for `hold` env steps. A row is truncated after `left` [n]
    env steps even if the environment would continue. None: no row reaches its step limit in this chunk."""
    n, chunk = actions.shape[:2]
    if chunk == hold == 1:
        return _one_step(step(rows, actions[:, 0]), n, left)
    rewards, valid, steps = np.zeros((n, chunk), np.float32), np.zeros((n, chunk), bool), np.zeros(n, np.int64)
    result = ChunkResult(rewards, valid, steps, np.zeros(n, bool), np.zeros(n, bool), np.full(n, -1, np.int8))
    alive: slice | NDArray[np.intp] = slice(None)
    done = 0
    for c in range(chunk):
        result.valid[alive, c] = True
        for _ in range(hold):
            outcome = step(rows[alive], actions[alive, c])
            done += 1
            result.rewards[alive, c] += outcome.reward
            result.success[alive] = np.maximum(result.success[alive], outcome.success)
            over = outcome.terminated | outcome.truncated
            if left is not None:
                over |= done >= left[alive]
            if not np.count_nonzero(over):
                continue
            result.steps[alive] = done
            result.terminated[alive] = outcome.terminated
            result.truncated[alive] = over & ~outcome.terminated
            alive = np.arange(n)[alive][~over]
            if not len(alive):
                return result
    result.steps[alive] = done
    return result


def _one_step(outcome: StepResult, n: int, left: NDArray[np.int64] | None) -> ChunkResult:
    """`step_chunk` for a single env step."""
    valid, steps = _one_each(n)
    cut = outcome.truncated if left is None else outcome.truncated | (left <= 1)
    truncated = cut & ~outcome.terminated
    return ChunkResult(outcome.reward[:, None], valid, steps, outcome.terminated, truncated, outcome.success)


@lru_cache
def _one_each(n: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    return np.ones((n, 1), bool), np.ones(n, np.int64)


def step_whole(
    step: Step, rows: NDArray[np.intp], actions: NDArray[Any], left: NDArray[np.int64] | None
) -> ChunkResult:
    """One env step that takes whole chunks [n,C,A]; its reward is that of the last action executed."""
    outcome = step(rows, actions)
    assert outcome.executed is not None, "checked by envs.results"
    n, valid = len(rows), outcome.executed
    rewards = np.zeros(valid.shape, np.float32)
    rewards[np.arange(n), valid.sum(1) - 1] = outcome.reward
    one = _one_step(outcome, n, left)
    return one._replace(rewards=rewards, valid=valid)


def stepper(spec: EnvSpec, hold: int) -> Callable[..., ChunkResult]:
    """The chunk-step function (step, rows, actions, left) of an environment."""
    if spec.chunk:
        return step_whole
    return lambda step, rows, actions, left: step_chunk(step, rows, actions, hold, left)


def whole_batch(env: EnvBatch) -> Step:
    """Step function for an environment that steps only whole batches: the other rows do an unrecorded no-op."""
    every = np.arange(env.rows)
    idle = np.broadcast_to(no_op(env.spec.action), (env.rows, env.spec.action.dim))

    def step(rows: NDArray[np.intp], actions: NDArray[Any]) -> StepResult:
        if len(rows) == env.rows:
            return env.step(every, actions)
        whole = idle.astype(actions.dtype)
        whole[rows] = actions
        reward, terminated, truncated, success, metrics, _ = env.step(every, whole)
        own = {name: values[rows] for name, values in metrics.items()}
        return StepResult(reward[rows], terminated[rows], truncated[rows], success[rows], own)

    return step


def no_op(action: ActionSpec) -> NDArray[Any]:
    """The no-op action: zero, clipped to the bounds."""
    zero = np.zeros(action.dim, action.dtype)
    return np.clip(zero, action.low, action.high).astype(action.dtype) if action.low else zero


log = logging.getLogger(__name__)


class EpisodeMetrics:
    """Episode metrics of an env batch of `rows` rows. NaN values are skipped."""

    def __init__(self, metrics: Mapping[str, Aggregate], rows: int) -> None:
        self._aggregates = dict(metrics)
        self._values = {name: np.zeros(rows) for name in metrics}
        self._counts = {name: np.zeros(rows, np.int64) for name in metrics}
        self._warned: set[str] = set()

    def wrap(self, step: Step) -> Step:
        def watched(rows: NDArray[np.intp], actions: NDArray[np.generic]) -> StepResult:
            outcome = step(rows, actions)
            self._add(rows, outcome.metrics)
            return outcome

        return watched

    def begin(self, rows: NDArray[np.intp]) -> None:
        for name, values in self._values.items():
            values[rows] = -np.inf if self._aggregates[name] == "max" else 0.0
            self._counts[name][rows] = 0

    def summarize(self, row: int) -> tuple[tuple[str, float], ...]:
        """(name, number) of the episode that ended in this row, finite numbers only."""
        numbers = {}
        for name, aggregate in self._aggregates.items():
            value, count = float(self._values[name][row]), int(self._counts[name][row])
            numbers[name] = math.nan if not count else value / count if aggregate == "mean" else value
        for name, number in numbers.items():
            if not math.isfinite(number) and name not in self._warned:
                self._warned.add(name)
                log.warning("env/metrics/%s: an episode gave %s, excluded from the mean (logged once)", name, number)
        return tuple((name, number) for name, number in numbers.items() if math.isfinite(number))

    def _add(self, rows: NDArray[np.intp], metrics: Mapping[str, NDArray[np.floating]]) -> None:
        for name, aggregate in self._aggregates.items():
            given, total = np.asarray(metrics[name], np.float64), self._values[name]
            there = ~np.isnan(given)
            chosen, numbers = rows[there], given[there]
            self._counts[name][chosen] += 1
            if aggregate == "last":
                total[chosen] = numbers
            elif aggregate == "max":
                total[chosen] = np.maximum(total[chosen], numbers)
            else:
                with np.errstate(over="ignore", invalid="ignore"):  # `summarize` drops a result that is not finite
                    total[chosen] += numbers
