"""An environment that needs a package which only other Pythons have, each in a version of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from polyrhythm.envs.base import EnvBatch, EpisodeRefused, RowNumbers, RowsFailed, StepResult
from polyrhythm.envs.mujoco import drawing
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task


class PinnedSettings(BaseModel):
    """Counts in steps of the package's version. defect: what goes wrong."""

    type: Literal["tests.plugins.simulators.pinned_env:PinnedSettings"] = (
        "tests.plugins.simulators.pinned_env:PinnedSettings"
    )
    defect: str = ""

    def check(self) -> None:
        if self.defect == "check tells":
            raise ConfigError(f"told {drawing().simulators}")

    def spec(self) -> EnvSpec:
        if self.defect == "spec asks":
            input("download? ")
        return EnvSpec(
            observation={"x": ArraySpec((2,), "float32"), "image": ArraySpec((3, 5, 3), "uint8")},
            action=ActionSpec("continuous", 2, low=(-1.0, -1.0), high=(1.0, 1.0)),
            tasks=(Task("count", "count"), Task("wait", "wait")),
            max_steps=6,
            metrics={"length": "last"},
        )

    def build(self, rows: int) -> EnvBatch:
        import pinned_sim  # type: ignore[import-not-found]

        if self.defect == "build refuses":
            raise ConfigError("size = 3: it must be even")
        return PinnedBatch(self, rows, float(pinned_sim.VERSION))


class PinnedBatch:
    def __init__(self, settings: PinnedSettings, rows: int, version: float) -> None:
        self.spec, self.rows, self.settings = settings.spec(), rows, settings
        self._x = np.zeros((rows, 2), np.float32)
        self._version, self._calls = version, 0

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        assert [type(given) for given in (rows, tasks, seeds)] == [list] * 3, "they index arrays"
        for row, task, seed in zip(rows, tasks, seeds, strict=True):
            self._x[row] = task, seed % 100
        if self.settings.defect == "refuses":
            raise RowsFailed({int(rows[0]): EpisodeRefused("too long"), int(rows[1]): KeyError("lost")})

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        self._calls += 1
        if self.settings.defect == "step raises":
            raise ValueError("the solver diverged")
        if self.settings.defect in ("Path", "as_root"):
            raise type(self.settings.defect, (PolyrhythmError,), {})("an error of another version")
        if self.settings.defect == "step ends the process" and self._calls == 4:
            os._exit(7)
        time.sleep(0.002)
        index = np.asarray(rows)
        self._x[index, 0] += self._version + 0 * np.asarray(actions, np.float32)[:, 0]
        no = np.zeros(len(index), bool)
        return StepResult(self._x[index, 0].copy(), no, no, no.copy(), {"length": self._x[index, 1].copy()})

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[Any]]) -> None:
        index = np.asarray(rows)
        out["x"][:] = self._x[index]
        out["image"][:] = index[:, None, None, None]

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.float32]:
        actions = np.full((len(rows), 2), 0.5, np.float32)
        if self.settings.defect == "refuses":
            raise RowsFailed({int(rows[1]): EpisodeRefused("too long")}, actions)
        return actions

    def close(self) -> None:
        pass
