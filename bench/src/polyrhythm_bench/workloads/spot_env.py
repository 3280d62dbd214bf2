"""A picture with a bright spot to go to: success or failure, easier or harder by the seed. It imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

SIDE, MAX_STEPS = 16, 8
_STRIDE, _NEAR = 0.25, 0.2


class SpotSettings(BaseModel):
    """An episode ends when the hand is within 0.2 of the spot; both begin anywhere in the square from -1 to 1.

    Observation: `image` uint8 [16,16,3] with the spot, `proprio` float32 [2], the hand. Action: float32 [2], a stride
    of at most 0.25 along each axis. Episodes have at most 8 steps, so the far corner is just within reach.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str = "polyrhythm_bench.workloads.spot_env:SpotSettings"
    """This class as module:Class."""
    reward: Literal["success", "progress"] = "success"
    """1 at the end, or in each step by how much nearer the hand has come, in strides."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"image": ArraySpec((SIDE, SIDE, 3), "uint8"), "proprio": ArraySpec((2,), "float32")},
            action=ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0)),
            tasks=(Task("spot", "go to the bright spot"),),
            max_steps=MAX_STEPS,
        )

    def build(self, rows: int) -> SpotBatch:
        return SpotBatch(self, rows)


class SpotBatch:
    def __init__(self, settings: SpotSettings, rows: int) -> None:
        self.rows, self.spec, self._settings = rows, settings.spec(), settings
        self._hand = np.zeros((rows, 2), np.float32)
        self._spot = np.zeros((rows, 2), np.float32)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:  # noqa: ARG002
        for row, seed in zip(rows, seeds, strict=True):
            self._hand[row], self._spot[row] = np.random.default_rng(seed).uniform(-1.0, 1.0, (2, 2))

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        before = self._distance(rows)
        self._hand[rows] = np.clip(self._hand[rows] + _STRIDE * np.clip(actions, -1.0, 1.0), -1.0, 1.0)
        after = self._distance(rows)
        there = after < _NEAR
        reward = (before - after) / _STRIDE if self._settings.reward == "progress" else there
        return StepResult(reward.astype(np.float32), there, np.zeros(len(there), np.bool_), there)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        axis = np.linspace(-1.0, 1.0, SIDE, dtype=np.float32)
        for place, (x, y) in enumerate(self._spot[rows]):
            lit = (np.abs(axis - y) < _NEAR)[:, None] & (np.abs(axis - x) < _NEAR)
            out["image"][place] = np.where(lit[..., None], np.uint8(255), np.uint8(0))
        out["proprio"][: len(rows)] = self._hand[rows]

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.generic]:
        stride: NDArray[np.float32] = np.clip((self._spot[rows] - self._hand[rows]) / _STRIDE, -1.0, 1.0)
        return stride

    def _distance(self, rows: RowNumbers) -> NDArray[np.float32]:
        offset = self._spot[rows] - self._hand[rows]
        distance: NDArray[np.float32] = np.hypot(offset[:, 0], offset[:, 1])
        return distance

    def close(self) -> None:
        """Nothing to free."""
