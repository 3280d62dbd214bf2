"""Chunk step of some rows: C primitive actions, each held for several env steps; a row that ends is not stepped on.

An environment whose spec has a `chunk` takes the C actions in one env step instead (`step_whole`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import EnvBatch, StepResult
from polyrhythm.specs import ActionSpec, EnvSpec

Step = Callable[[NDArray[np.intp], NDArray[Any]], StepResult]


class ChunkResult(NamedTuple):
    """Outcome of a chunk step for n rows.

    rewards [n,C] float32, summed over the env steps of an action; valid [n,C]: the action was executed; steps [n]: env
    steps executed; terminated, truncated [n]; success [n]: 1 if the task was solved at any of the steps, -1 if none of
    them said whether it is.
    """

    rewards: NDArray[np.float32]
    valid: NDArray[np.bool_]
    steps: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_] | NDArray[np.int8]

    @property
    def nan_rewards(self) -> NDArray[np.intp]:
        """Positions of the rows with a reward of NaN: they alone can have failed in their episode (`GuardedEnv`). A row
        whose episode ended earlier in the chunk may have failed since, in a no-op."""
        return np.flatnonzero(np.isnan(self.rewards).any(1))

    def part(self, first: int, stop: int) -> ChunkResult:
        """Rows first..stop-1."""
        return ChunkResult(*(array[first:stop] for array in self))  # type: ignore[arg-type]


def step_chunk(
    step: Step, rows: NDArray[np.intp], actions: NDArray[Any], hold: int, left: NDArray[np.int64] | None
) -> ChunkResult:
    """Execute actions [n,C,A] in the n env rows, each action for `hold` env steps.

    A row is truncated after `left` [n] env steps even if the environment goes on. None: no row reaches its step limit
    in this chunk.
    """
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
    """`valid` and `steps` of n rows after one env step."""
    return np.ones((n, 1), bool), np.ones(n, np.int64)


def step_whole(
    step: Step, rows: NDArray[np.intp], actions: NDArray[Any], left: NDArray[np.int64] | None
) -> ChunkResult:
    """One env step that takes the chunks [n,C,A] whole; its reward is that of the last action executed."""
    outcome = step(rows, actions)
    assert outcome.executed is not None, "checked by envs.results"
    n, valid = len(rows), outcome.executed
    rewards = np.zeros(valid.shape, np.float32)
    rewards[np.arange(n), valid.sum(1) - 1] = outcome.reward
    one = _one_step(outcome, n, left)
    return one._replace(rewards=rewards, valid=valid)


def stepper(spec: EnvSpec, hold: int) -> Callable[..., ChunkResult]:
    """The function (step, rows, actions, left) of an environment's chunk steps."""
    if spec.chunk:
        return step_whole
    return lambda step, rows, actions, left: step_chunk(step, rows, actions, hold, left)


def whole_batch(env: EnvBatch) -> Step:
    """A step function for an environment that steps only whole batches: the other rows do a no-op, unrecorded."""
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
