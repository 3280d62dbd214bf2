"""A tiny environment with one defect, by its name."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel

from polyrhythm.envs.base import EnvTraits, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

LIMIT = 4


class Walk:
    """A point walks on a line from where its seed puts it."""

    def __init__(self, rows: int, defect: str) -> None:
        self.rows, self.defect = rows - (defect == "rows"), defect
        self.spec = spec(defect if defect != "other spec" else "")
        self.place, self.steps = np.zeros(rows, np.float32), np.zeros(rows, np.int64)
        self.resets, self.begun = 0, [0] * rows

    def reset(self, rows: Any, tasks: Any, seeds: Any) -> None:
        if self.defect == "reset raises":
            raise RuntimeError("no such state")
        if self.defect == "reset imports":
            importlib.import_module("no_such_simulator")
        if self.defect == "reset hangs":
            time.sleep(20.0)
        if self.defect == "second task" and 1 in tasks:
            raise KeyError("b")
        if self.defect == "ended stays" and len(rows) == 1 and self.steps[rows[0]] >= LIMIT:
            return
        for row, seed in zip(rows, seeds, strict=True):
            self.resets, self.begun[row] = self.resets + 1, seed
            by = self.resets if self.defect == "history" else row if self.defect == "row's own" else 0
            self.place[row] = (0 if self.defect == "one state" else seed % (self.spec.initial_states or 97)) + by
            self.steps[row] = 0
        if self.defect == "resets all":
            self.place[:] = self.place[rows[0]]
        if self.defect == "resets beside" and threading.current_thread() is not threading.main_thread():
            self.place[0] += 0.5

    def step(self, rows: Any, actions: Any) -> Any:
        picked = np.asarray(rows)
        if self.defect == "step raises":
            return actions[:, 7]
        if self.defect == "clipless":
            assert np.abs(actions).max() < 0.9, "a motor broke"
        moved = slice(None) if self.defect == "steps all" else picked
        self.place[self.steps >= LIMIT] += self.defect == "ended moves"
        self.place[moved] += 1 + np.mean(actions)
        self.steps[moved] += 1
        ended = self.steps[picked] >= LIMIT
        if self.defect == "autoreset" and ended.any():
            self.reset(picked, [0] * len(rows), [self.begun[row] for row in rows])
        reward = self.place[picked] * (np.nan if self.defect == "nan reward" else 1)
        never = np.zeros(len(rows), bool)
        match self.defect:
            case "tuple":
                return reward, ended, never, never
            case "success":
                return StepResult(reward, ended, never, never.astype(np.float32))
            case "scalar":
                return StepResult(reward, ended, np.False_, never)
        return StepResult(reward, ended, never, never)

    def observe(self, rows: Any, out: Any) -> None:
        picked = np.asarray(rows)
        match self.defect:
            case "rebinds":
                out["x"] = self.place[picked][:, None]
                return
            case "unwritten":
                out["x"][:1, 0] = self.place[picked][:1]
                return
            case "nan":
                out["x"][:] = np.nan
                return
            case "wrong rows":
                picked = np.arange(len(picked))
            case "shape":
                out["x"][:] = np.zeros(3)
                return
        out["x"][: len(picked), 0] = self.place[picked] + (np.random.rand() if self.defect == "noise" else 0)

    def close(self) -> None:
        if self.defect == "close raises":
            raise OSError("no such window")


class DeviceWalk(Walk):
    """The same on a device that it can leave."""

    def observe_on_device(self, rows: Any) -> Any:
        shown = torch.from_numpy(self.place[np.asarray(rows)][:, None].copy())
        return {"x": shown + (self.defect == "other on device")}

    def suspend(self) -> int:
        return 4 * self.rows

    def resume(self) -> None:
        self.place += self.defect == "forgets"


def spec(defect: str = "") -> EnvSpec:
    return EnvSpec(
        observation={"x": ArraySpec((1,), "float32")},
        action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
        tasks=(Task("a", "do a"), Task("b", "do b")),
        max_steps=LIMIT + (defect == "other spec"),
        initial_states=50 * (defect == "fixed states"),  # which is none
    )


def _crash() -> None:
    sys.stderr.write("driver: out of luck\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


#: Defect → traits that are declared and not true.
UNTRUE = {
    "no expert": EnvTraits(expert=True),
    "no variants": EnvTraits(variants=True),
    "resets beside": EnvTraits(resets_ahead=True),
}


class WalkSettings(BaseModel):
    """The point, with a defect."""

    type: Literal["tests.envs.broken_envs:WalkSettings"] = "tests.envs.broken_envs:WalkSettings"
    defect: str = ""

    @property
    def traits(self) -> EnvTraits:
        return UNTRUE.get(self.defect, EnvTraits(resets_ahead=True))

    def spec(self) -> EnvSpec:
        if self.defect == "spec raises":
            return {}["spec"]
        if self.defect == "spec hangs":
            time.sleep(20.0)
        if self.defect == "spec fatal":
            _crash()
        return spec(self.defect)

    def build(self, rows: int) -> Any:
        if self.defect == "build raises":
            raise OSError("no licence")
        if self.defect == "fatal":
            _crash()
        if self.defect == "build imports":
            importlib.import_module("no_such_simulator")
        if self.defect in ("on device", "other on device", "forgets"):
            return DeviceWalk(rows, self.defect)
        return "a batch" if self.defect == "no batch" else Walk(rows, self.defect)
