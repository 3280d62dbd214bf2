"""An environment that costs next to nothing: all rows in a few array operations. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

STATE_DIM, ACTION_DIM = 16, 4
_DECAY, _GAIN = np.float32(0.9), np.float32(0.1)


class DriftSettings(BaseModel):
    """Each row's state decays and is pushed by its actions; the reward is how near to zero its first entry is.

    Observation: `state` float32 [16]. Action: float32 [4] in -1..1. Episodes last `episode_steps` steps, cut in time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    episode_steps: int
    """Env steps of an episode."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"state": ArraySpec((STATE_DIM,), "float32")},
            action=ActionSpec("continuous", ACTION_DIM, low=(-1.0,) * ACTION_DIM, high=(1.0,) * ACTION_DIM),
            tasks=(Task("drift", "stay at zero"),),
            max_steps=self.episode_steps,
        )

    def build(self, rows: int) -> DriftBatch:
        return DriftBatch(self, rows)


class DriftBatch:
    def __init__(self, settings: DriftSettings, rows: int) -> None:
        self.rows, self.spec = rows, settings.spec()
        self._state = np.zeros((rows, STATE_DIM), np.float32)
        self._push = np.random.default_rng(0).normal(size=(ACTION_DIM, STATE_DIM)).astype(np.float32) * _GAIN
        self._phase = np.arange(STATE_DIM)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:  # noqa: ARG002
        self._state[rows] = np.sin(np.asarray(seeds)[:, None] % 1000 + self._phase)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        state = self._state[rows] * _DECAY + actions @ self._push  # type: ignore[operator]
        self._state[rows] = state
        no = np.zeros(len(rows), np.bool_)
        return StepResult(-np.abs(state[:, 0]), no, no, no)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        out["state"][: len(rows)] = self._state[rows]

    def close(self) -> None:
        """Nothing to free."""
