"""An environment that shows one large image and times how long it waits for the action. It imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

IMAGE_SHAPE = (512, 512, 3)
ACTION_DIM = 7


class StopwatchSettings(BaseModel):
    """Episodes of `episode_steps` steps; the waits of each process go to the file `times`, int64 nanoseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    episode_steps: int
    """Env steps of an episode."""
    times: str
    """File that is written when the batch is closed."""

    def spec(self) -> EnvSpec:
        bound = (1.0,) * ACTION_DIM
        return EnvSpec(
            observation={"image": ArraySpec(IMAGE_SHAPE, "uint8")},
            action=ActionSpec("continuous", ACTION_DIM, low=tuple(-x for x in bound), high=bound),
            tasks=(Task("stopwatch", "wait"),),
            max_steps=self.episode_steps,
        )

    def build(self, rows: int) -> StopwatchBatch:
        return StopwatchBatch(self, rows)


class StopwatchBatch:
    """One row. A wait begins when the observation is asked for, before it is written, and ends with the next step."""

    def __init__(self, settings: StopwatchSettings, rows: int) -> None:
        assert rows == 1, "one row is timed"
        self.rows, self.spec = rows, settings.spec()
        self._file = Path(settings.times)
        self._image = np.random.default_rng(0).integers(0, 256, IMAGE_SHAPE, np.uint8)
        self._asked = 0
        self._waits: list[int] = []

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Every episode is the same."""

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:  # noqa: ARG002 (the contract's)
        self._waits.append(time.perf_counter_ns() - self._asked)
        no = np.zeros(1, np.bool_)
        return StepResult(np.zeros(1, np.float32), no, no, no)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:  # noqa: ARG002
        self._asked = time.perf_counter_ns()
        out["image"][0] = self._image

    def close(self) -> None:
        np.array(self._waits, np.int64).tofile(self._file)
