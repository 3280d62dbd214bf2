"""Implements sleeping environments that are stepped as one batch: each step takes as long as the slowest row.

This is the best possible time of parallel stepping, without a thread or process for each environment.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.envs.latency import LatencySettings
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.distributions import parse_distribution


class SlowestSettings(BaseModel):
    """Rows of the synthetic environment, each of which takes its own time for a step."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    episode_steps: int
    """Env steps of an episode."""
    step_time: str
    """Distribution of a row's step time."""

    def spec(self) -> EnvSpec:
        return self.quick().spec()

    def build(self, rows: int) -> SlowestBatch:
        return SlowestBatch(self, rows)

    def quick(self) -> LatencySettings:
        """The environment itself, which takes no time."""
        return LatencySettings(episode_steps=self.episode_steps, step_time="constant:0ms")


class SlowestBatch:
    """A batch that sleeps as long as its slowest row, then steps all rows."""

    def __init__(self, settings: SlowestSettings, rows: int) -> None:
        self._batch = settings.quick().build(rows)
        self.rows, self.spec = rows, self._batch.spec
        self._step_time, self._rng = parse_distribution(settings.step_time), random.Random(0)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._batch.reset([int(row) for row in rows], tasks, seeds)  # as hashing takes them

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        time.sleep(max(self._step_time.sample(self._rng) for _ in range(self.rows)))
        return self._batch.step(rows, actions)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._batch.observe(rows, out)

    def close(self) -> None:
        self._batch.close()
