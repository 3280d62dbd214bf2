"""A vector environment of your own: carts on rails that all step in one call. `polyrhythm train rail.yaml`, here.

A simulator that computes all its worlds at once, as those on a GPU do, says so in its spec: `step_rows=False`. It is
then always given an action for every row; rows that run no episode get one of no effect, and what they give is thrown
away. `reset_rows=True` is a partial reset: rows begin episodes on their own, while the others stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyrhythm.config.base import Count, Positive, Section
from polyrhythm.envs.base import StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

SECONDS = 0.1


class RailSettings(Section):
    """What the recipe's `env` section may say; `Section` refuses every other key."""

    type: str = "rail:RailSettings"
    """Where this class is."""
    force: Positive = 2.0
    """Acceleration of a full action, in m/s²."""
    max_steps: Count = 40
    """Steps after which an episode is cut."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"position": ArraySpec((1,), "float32"), "speed": ArraySpec((1,), "float32")},
            action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
            tasks=(Task("stop", "stop the cart in the middle"),),
            max_steps=self.max_steps,
            reset_rows=True,
            step_rows=False,
            metrics={"distance": "last", "energy": "sum"},  # env/metrics/distance, env/metrics/energy
        )

    def build(self, rows: int) -> RailBatch:
        return RailBatch(self, rows)


class RailBatch:
    """`rows` carts, an array for each quantity."""

    def __init__(self, settings: RailSettings, rows: int) -> None:
        self.spec, self.rows, self._force = settings.spec(), rows, settings.force
        self._position, self._speed = np.zeros(rows, np.float32), np.zeros(rows, np.float32)

    def reset(self, rows: Any, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Some rows, or all; each from its own seed, so that it begins alike wherever and beside whom it runs."""
        drawn = np.stack([np.random.default_rng(seed).uniform(-1.0, 1.0, 2) for seed in seeds])
        self._position[rows], self._speed[rows] = drawn[:, 0], 0.5 * drawn[:, 1]

    def step(self, rows: Any, actions: Any) -> StepResult:
        """All rows, in order: actions [rows,1]."""
        self._speed += SECONDS * self._force * actions[:, 0]
        self._position += SECONDS * self._speed
        distance, never = np.abs(self._position), np.zeros(self.rows, bool)
        stopped = (distance < 0.1) & (np.abs(self._speed) < 0.2)
        return StepResult(
            reward=np.where(stopped, 10.0, -distance).astype(np.float32),
            terminated=stopped,
            truncated=never,  # the time limit is kept for you
            success=stopped,
            metrics={"distance": distance, "energy": np.abs(actions[:, 0])},
        )

    def observe(self, rows: Any, out: dict[str, Any]) -> None:
        """Write what these rows see into `out`, which lies in shared memory; do not put other arrays there."""
        out["position"][:, 0] = self._position[rows]
        out["speed"][:, 0] = self._speed[rows]

    def close(self) -> None:
        """Nothing to free."""
