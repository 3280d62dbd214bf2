"""Sleeping environments of a loop that waits for all of them: each step takes as long as the slowest row's.

That is what stepping them side by side takes at best, without a thread or a process for each.
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
    """Law of a row's step time."""

    def spec(self) -> EnvSpec:
        return self.quick().spec()

    def build(self, rows: int) -> SlowestBatch:
        return SlowestBatch(self, rows)

    def quick(self) -> LatencySettings:
        """The environment itself, which takes no time."""
        return LatencySettings(episode_steps=self.episode_steps, step_time="constant:0ms")


class SlowestBatch:
    """Sleeps as long as the slowest of its rows, then steps them all."""

    def __init__(self, settings: SlowestSettings, rows: int) -> None:
        self._batch = settings.quick().build(rows)
        self.rows, self.spec = rows, self._batch.spec
        self._law, self._rng = parse_distribution(settings.step_time), random.Random(0)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._batch.reset([int(row) for row in rows], tasks, seeds)  # as hashing takes them

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        time.sleep(max(self._law.sample(self._rng) for _ in range(self.rows)))
        return self._batch.step(rows, actions)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._batch.observe(rows, out)

    def close(self) -> None:
        self._batch.close()
