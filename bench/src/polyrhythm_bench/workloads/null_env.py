"""An environment that computes nothing: what a run of it costs is ours. It imports no torch, like any simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task


class NullEnvSettings(BaseModel):
    """Observation: `state` float32 [1], always zero. Action: float32 [1] in -1..1, ignored. Reward: zero.

    An episode's length is uniform in 1..`episode_steps`, set by its seed, so that env batches which begin together do
    not end together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    episode_steps: Annotated[int, Field(ge=1)] = 50
    """Env steps of the longest episode."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"state": ArraySpec((1,), "float32")},
            action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
            tasks=(Task("null", "do nothing"),),
            max_steps=self.episode_steps,
        )

    def build(self, rows: int) -> NullEnvBatch:
        return NullEnvBatch(self, rows)


class NullEnvBatch:
    """Rows that only count their steps."""

    def __init__(self, settings: NullEnvSettings, rows: int) -> None:
        self.rows, self.spec = rows, settings.spec()
        self._left = np.zeros(rows, np.int64)
        self._no, self._reward = np.zeros(rows, np.bool_), np.zeros(rows, np.float32)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:  # noqa: ARG002
        for row, seed in zip(rows, seeds, strict=True):
            self._left[row] = 1 + seed % self.spec.max_steps

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:  # noqa: ARG002 (the contract's)
        self._left[rows] -= 1
        no = self._no[: len(rows)]
        return StepResult(self._reward[: len(rows)], self._left[rows] <= 0, no, no)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        out["state"][: len(rows)] = 0

    def close(self) -> None:
        """Holds nothing."""
