"""Environments with something to see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from polyrhythm.envs.base import RowsFailed, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task
from polyrhythm.specs.hashing import mix


class LampSettings(BaseModel):
    """A lamp of as many lit columns as the seed says; pushing right as often as that succeeds.

    pictures: as an observation, drawn by the batch (also badly), or not at all. only_rows: no other size can be built.
    bad_seed: an episode that fails at its reset, at its second step (alone, or with all rows of the call), or then has
    a number that is not finite, as `fails` says; the row's next episodes have that too, unless the row was discarded.
    """

    type: str = "tests.pipeline.pictures:LampSettings"
    pictures: Literal["observed", "drawn", "misdrawn", "none"] = "observed"
    step_rows: bool = True
    only_rows: int = 0
    bad_seed: int = -1
    fails: Literal["reset", "step", "all", "reward", "observation"] = "step"

    def spec(self) -> EnvSpec:
        image = {"image": ArraySpec((16, 16, 3), "uint8")} if self.pictures == "observed" else {}
        return EnvSpec(
            observation={"left": ArraySpec((1,), "float32"), **image},
            action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
            tasks=(Task("first", "push to the right"), Task("second", "push to the right again")),
            max_steps=12,
            reset_rows=self.step_rows,
            step_rows=self.step_rows,
        )

    def build(self, rows: int) -> Lamps:
        if self.only_rows not in (0, rows):
            raise ValueError(f"{self.only_rows} rows or none")
        return DrawnLamps(self, rows) if "drawn" in self.pictures else Lamps(self, rows)


class Lamps:
    def __init__(self, settings: LampSettings, rows: int) -> None:
        self.settings, self.spec, self.rows = settings, settings.spec(), rows
        self.left = np.zeros(rows, np.float32)
        self.bad, self.done = np.zeros(rows, bool), np.zeros(rows, np.int64)

    def reset(self, rows: Any, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self.left[rows] = [3 + mix(seed, task) % 5 for task, seed in zip(tasks, seeds, strict=True)]
        spoilt = self.bad[rows] & (self.settings.fails in ("reward", "observation"))
        self.bad[rows], self.done[rows] = spoilt | [seed == self.settings.bad_seed for seed in seeds], 0
        if self.settings.fails == "reset":
            self.raise_for(np.asarray(rows)[self.bad[rows]])

    def step(self, rows: Any, actions: Any) -> StepResult:
        self.left[rows] -= np.clip(actions[:, 0], -1.0, 1.0)
        there, never = self.left[rows] <= 0, np.zeros(len(rows), bool)
        self.done[rows] += 1
        result = StepResult(there.astype(np.float32) + actions[:, 0], there, never, there)
        now = self.bad[rows] & (self.done[rows] == 2)
        if self.settings.fails == "reward":
            result.reward[now] = np.nan
        elif self.settings.fails == "all" and now.any():
            raise ValueError("no row is known")
        elif self.settings.fails == "step":
            self.raise_for(np.asarray(rows)[now], result)
        return result

    def raise_for(self, rows: Any, result: StepResult | None = None) -> None:
        if len(rows):
            raise RowsFailed({int(row): ValueError("the lamp fell") for row in rows}, result)

    def observe(self, rows: Any, out: dict[str, Any]) -> None:
        out["left"][:, 0] = self.left[rows]
        if self.settings.fails == "observation":
            out["left"][self.bad[rows] & (self.done[rows] >= 2)] = np.inf
        for place, row in enumerate(rows if "image" in out else ()):
            out["image"][place] = self.picture(row)

    def discard(self, row: int) -> None:
        self.bad[row] = False

    def picture(self, row: int) -> np.ndarray:
        drawn = np.zeros((16, 16, 3), np.uint8)
        drawn[:, : max(0, int(2 * self.left[row]))] = 255
        return drawn

    def close(self) -> None:
        pass


class DrawnLamps(Lamps):
    def render(self, row: int) -> np.ndarray:
        return self.picture(row)[..., 0] if self.settings.pictures == "misdrawn" else self.picture(row)
