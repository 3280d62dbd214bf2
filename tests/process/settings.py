"""Environments that misbehave on purpose, in whatever process they are."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings


def once(marker: str) -> bool:
    """True for the first caller of all processes."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class LeavingSettings(GymnasiumSettings):
    """CartPole that can leave the device of its simulator, and must not be called while it is off it."""

    type: Literal["tests.process.settings:LeavingSettings"] = "tests.process.settings:LeavingSettings"
    leaves_device: ClassVar[bool] = True

    def build(self, rows: int) -> LeavingBatch:
        return LeavingBatch(self, rows)


class LeavingBatch(GymnasiumBatch):
    """What it keeps on its device is said to be a thousand bytes."""

    away = False

    def suspend(self) -> int:
        self.away = True
        return 1000

    def resume(self) -> None:
        self.away = False

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        assert not self.away
        super().reset(rows, tasks, seeds)

    def step(self, rows: Any, actions: Any) -> Any:
        assert not self.away
        return super().step(rows, actions)

    def observe(self, rows: Any, out: Any) -> None:
        assert not self.away
        super().observe(rows, out)


class FaultySettings(GymnasiumSettings):
    """CartPole that does `fault` at its `at`-th call of `call`, once per `marker`; "always" with an empty marker.

    fault: hang (lets other threads run), exit (the process ends with status 7).
    """

    type: Literal["tests.process.settings:FaultySettings"] = "tests.process.settings:FaultySettings"
    call: str = "step"
    fault: str = ""
    at: int = 1
    marker: str = ""
    spares: int = 0
    """Batches of so many rows are built all the same, as they are to try the environment."""
    modules: str = ""
    """File that gets the names of the modules loaded in the simulator's process, when it is closed."""

    def build(self, rows: int) -> FaultyBatch:
        return FaultyBatch(self, rows)


class FaultyBatch(GymnasiumBatch):
    def __init__(self, settings: FaultySettings, rows: int) -> None:
        self._faulty, self._calls = settings, 0
        if settings.call == "build" and rows != settings.spares:
            self._misbehave()
        super().__init__(settings, rows)

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        self._called("reset")
        super().reset(rows, tasks, seeds)

    def step(self, rows: Any, actions: Any) -> Any:
        self._called("step")
        return super().step(rows, actions)

    def close(self) -> None:
        if self._faulty.modules:
            Path(self._faulty.modules).write_text("\n".join(sys.modules))
        super().close()

    def _called(self, call: str) -> None:
        if call == self._faulty.call:
            self._calls += 1
            if self._calls == self._faulty.at:
                self._misbehave()

    def _misbehave(self) -> None:
        if self._faulty.marker and not once(self._faulty.marker):
            return
        if self._faulty.fault == "hang":
            time.sleep(3600)
        elif self._faulty.fault == "exit":
            sys.stderr.write("the simulator says good-bye\n")
            sys.stderr.flush()
            os._exit(7)


class HangingSettings(GymnasiumSettings):
    """CartPole whose episodes of the seed `hangs` hang at their first step, with all rows of that call."""

    type: Literal["tests.process.settings:HangingSettings"] = "tests.process.settings:HangingSettings"
    hangs: int = -1

    def build(self, rows: int) -> HangingBatch:
        return HangingBatch(self, rows)


class HangingBatch(GymnasiumBatch):
    def __init__(self, settings: HangingSettings, rows: int) -> None:
        super().__init__(settings, rows)
        self._hangs, self._seeds = settings.hangs, [-1] * rows

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        super().reset(rows, tasks, seeds)
        for row, seed in zip(rows, seeds, strict=True):
            self._seeds[int(row)] = int(seed)

    def step(self, rows: Any, actions: Any) -> Any:
        if self._hangs in [self._seeds[int(row)] for row in rows]:
            time.sleep(3600)
        return super().step(rows, actions)


class DivergingSettings(GymnasiumSettings):
    """CartPole: an episode whose seed leaves 0 when divided by `reward_of` earns NaN at its third step; by `shown_of`,
    shows infinity from then on."""

    type: Literal["tests.process.settings:DivergingSettings"] = "tests.process.settings:DivergingSettings"
    reward_of: int = 5
    shown_of: int = 7

    def build(self, rows: int) -> Diverging:
        return Diverging(self, rows)


class Diverging(GymnasiumBatch):
    def __init__(self, settings: DivergingSettings, rows: int) -> None:
        super().__init__(settings, rows)
        self._diverging, self._begun_by, self._done = settings, np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        super().reset(rows, tasks, seeds)
        self._begun_by[list(rows)], self._done[list(rows)] = seeds, 0

    def step(self, rows: Any, actions: Any) -> Any:
        assert np.isfinite(actions).all(), "no environment is given such actions"
        result = super().step(rows, actions)
        self._done[rows] += 1
        wrong = (self._begun_by[rows] % self._diverging.reward_of == 0) & (self._done[rows] == 3)
        return result._replace(reward=np.where(wrong, np.nan, result.reward))

    def observe(self, rows: Any, out: Any) -> None:
        super().observe(rows, out)
        (shown,) = out.values()
        wrong = (self._begun_by[list(rows)] % self._diverging.shown_of == 0) & (self._done[list(rows)] >= 3)
        shown[: len(rows)][wrong] = np.inf
