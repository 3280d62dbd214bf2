"""A synthetic environment that only sleeps, for benchmarks and tests of scheduling without a simulator.

The batch sleeps once per step for a random time, as a vectorised simulator computes all its rows at once.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm.specs.hashing import mix

_TASK = Task("latency", "wait")
#: Number of different observations.
_WINDOWS = 4096


class LatencySettings(BaseModel):
    """Episodes of fixed length whose steps and resets take random times.

    Observation: `state` float32 of `observation_shape`, uniform in 0..1, a function of seed and step. Action: float32
    [action_dim] in -1..1, ignored. Reward 1 per step, no success; the time limit ends the episode.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: Literal["latency"] = "latency"
    episode_steps: Annotated[int, Field(ge=1)] = 50
    """Env steps of an episode."""
    step_time: str = "constant:10ms"
    """Distribution of the batch's step time, such as `lognormal:10ms:0.8` (see `specs.distributions`)."""
    reset_time: str = "constant:0ms"
    """Distribution of the time of one reset call, independent of the number of rows."""
    times_by: Literal["history", "seed", "chance"] = "history"
    """Source of the random times: a batch's resets so far, the seeds of its episodes (slow states), or chance alone
    (slow machines)."""
    observation_shape: tuple[Annotated[int, Field(ge=1)], ...] = (8,)
    """Shape of a row's observation."""
    action_dim: Annotated[int, Field(ge=1)] = 7
    """Entries of an action."""

    @field_validator("step_time", "reset_time")
    @classmethod
    def _parses(cls, text: str) -> str:
        parse_distribution(text)
        return text

    def spec(self) -> EnvSpec:
        dim = self.action_dim
        return EnvSpec(
            observation={"state": ArraySpec(self.observation_shape, "float32")},
            action=ActionSpec("continuous", dim, low=(-1.0,) * dim, high=(1.0,) * dim),
            tasks=(_TASK,),
            max_steps=self.episode_steps,
            step_rows=False,
            reports_success=False,
        )

    def build(self, rows: int) -> LatencyBatch:
        return LatencyBatch(self, rows, time.sleep)


class LatencyBatch:
    """Rows that reset individually and step together.

    Sleep times are a function of the seeds of all resets so far, in order: equal calls sleep equally. With times_by
    seed they are one of the seeds of the episodes under way, whichever batch these are in, as in the simulated cluster:
    the members of a group are equally fast. With chance all batches are independent. `sleep` is a parameter for tests.
    """

    def __init__(self, settings: LatencySettings, rows: int, sleep: Callable[[float], None]) -> None:
        self.rows, self.spec, self._sleep = rows, settings.spec(), sleep
        self._step_time = parse_distribution(settings.step_time)
        self._reset_time = parse_distribution(settings.reset_time)
        self._by_seed = settings.times_by == "seed"
        self._history = secrets.randbits(63) if settings.times_by == "chance" else 0
        self._rng = random.Random()
        self._seeds = [0] * rows
        self._reward, self._no = np.ones(rows, np.float32), np.zeros(rows, np.bool_)
        self._steps = np.zeros(rows, np.int64)
        # Observations are windows of this array, so observing is only a copy.
        shape = settings.observation_shape
        self._noise = np.random.default_rng(0).random(_WINDOWS + math.prod(shape), dtype=np.float32)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            assert task == 0, f"task {task}: the synthetic environment has one task"
            self._seeds[row], self._steps[row] = seed, 0
            self._history = mix(self._history, row, seed)
        self._rng.seed(mix(*self._seeds) if self._by_seed else self._history)
        self._sleep(self._reset_time.sample(self._rng))

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:  # noqa: ARG002 (the contract's)
        assert len(rows) == self.rows, f"rows {list(rows)}: this batch steps all {self.rows} rows as one"
        self._sleep(self._step_time.sample(self._rng))
        self._steps += 1
        return StepResult(self._reward.copy(), self._no.copy(), self._steps >= self.spec.max_steps, self._no.copy())

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        state = out["state"]
        size = state[0].size
        for i, row in enumerate(rows):
            first = mix(self._seeds[row], int(self._steps[row])) % _WINDOWS
            state[i] = self._noise[first : first + size].reshape(state.shape[1:])

    def close(self) -> None:
        """Nothing to free."""
