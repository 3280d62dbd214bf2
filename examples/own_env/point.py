"""An environment of your own in one file: a point that is to be pushed to a goal. `polyrhythm train point.yaml`, here.

Two classes are all that there is to write: settings that describe the environment without building it, and a batch of
rows that step together. Neither torch nor a policy is known to it. Contracts: src/polyrhythm/envs/base.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyrhythm.config.base import Count, Positive, Section
from polyrhythm.envs.base import StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

GOALS = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)


class PointSettings(Section):
    """What the recipe's `env` section may say; `Section` refuses every other key."""

    type: str = "point:PointSettings"
    """Where this class is."""
    step_size: Positive = 0.2
    """How far a full action pushes."""
    max_steps: Count = 25
    """Steps after which an episode is cut."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"position": ArraySpec((2,), "float32"), "goal": ArraySpec((2,), "float32")},
            action=ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0)),
            tasks=(Task("right", "go to the right"), Task("up", "go up")),
            max_steps=self.max_steps,
        )

    def build(self, rows: int) -> PointBatch:
        return PointBatch(self, rows)


class PointBatch:
    """`rows` points. Rows are reset and stepped on their own."""

    def __init__(self, settings: PointSettings, rows: int) -> None:
        self.spec, self.rows = settings.spec(), rows
        self._step_size = settings.step_size
        self._position = np.zeros((rows, 2), np.float32)
        self._goal = np.zeros((rows, 2), np.float32)

    def reset(self, rows: Any, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """The same task and seed begin in the same state."""
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            self._position[row] = np.random.default_rng(seed).uniform(-0.3, 0.3, 2)
            self._goal[row] = GOALS[task]

    def step(self, rows: Any, actions: Any) -> StepResult:
        """One push of each of these rows: actions [n,2] within the bounds of the spec."""
        self._position[rows] += self._step_size * actions
        distance = np.linalg.norm(self._position[rows] - self._goal[rows], axis=1).astype(np.float32)
        there = distance < 0.15
        return StepResult(
            reward=np.where(there, 10.0, -distance).astype(np.float32),
            terminated=there,
            truncated=np.zeros(len(distance), bool),  # the time limit is kept for you
            success=there,
        )

    def observe(self, rows: Any, out: dict[str, Any]) -> None:
        """Write what is seen now; `out` lies in shared memory."""
        out["position"][:] = self._position[rows]
        out["goal"][:] = self._goal[rows]

    def close(self) -> None:
        """Nothing to free."""
