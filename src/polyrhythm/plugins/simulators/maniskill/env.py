"""Adapter for ManiSkill's tasks. Another process starts the simulator to determine observations and actions.

`python -m` this module is that process (`maniskill.probe`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.base import EnvBatch
from polyrhythm.errors import MissingError, PolyrhythmError, install_command
from polyrhythm.plugins.simulators.maniskill.drivers import examine, named_tasks, probe
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields
from polyrhythm.plugins.simulators.variation import AppearanceSettings
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.plain import as_plain

#: Steps and observations whose median time is reported.
_TIMED = 5


class ManiSkillSettings(ManiSkillFields):
    """ManiSkill 3 tasks with state or camera images, simulated on the CPU or all rows together on a GPU.

    Observation: `state` float32 [N], ManiSkill's own, with objects and goals; or with `rgb` `image` uint8 [H,W,3] of
    `image_size` and `proprio` float32 [N]; `rgbd` adds `depth` float32 [H,W,1] in metres. Action: float32 [A],
    ManiSkill's own of the control mode.

    backend cpu: an instance per row; equal (task, seed) give bit-equal initial states. backend gpu: one task, all rows
    step together; each row is reset on its own with its seed, but rows lie at different places of one scene, so that
    equal seeds are equal up to float32 rounding, and contacts are not reproducible. The gpu backend was never run.
    """

    def check(self) -> None:
        """Create an instance of each task in another process. MissingError: an asset or driver is missing;
        ConfigError: an unknown task or setting."""
        self.spec()

    def spec(self) -> EnvSpec:
        """The spec of a batch, determined in another process once per settings, which takes some seconds.

        ConfigError or MissingError as from `check`.
        """
        usual = {"placement": "usual", "appearance": AppearanceSettings()}
        backend = "gpu" if self.simulates_on_gpu else "cpu"  # which `auto` would choose anew for the usual ones
        return probe(self.model_copy(update={**usual, "backend": backend})).spec

    def rendering(self) -> ManiSkillSettings:
        """Settings whose batches can render rows for a video: these."""
        return self

    def build(self, rows: int) -> EnvBatch:
        """A batch of `rows` rows; starts the first instance of each task."""
        from polyrhythm.plugins.simulators.maniskill.batch import CpuBatch, GpuBatch
        from polyrhythm.plugins.simulators.maniskill.world import World

        if self.simulates_on_gpu:
            return GpuBatch(self, World(self, self.tasks[0], rows))
        return CpuBatch(self, rows)

    @classmethod
    def findings(cls) -> Iterator[Finding]:
        """Driver, GPU and a trial run of the simulator, for `polyrhythm doctor`."""
        return examine(cls(tasks=("PickCube-v1",), observation="rgb"))


def _tried(settings: ManiSkillSettings) -> dict[str, Any]:
    began = time.perf_counter()
    batch = settings.build(1)
    start_s = time.perf_counter() - began
    try:
        batch.reset([0], [0], [0])
        out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
        idle = np.clip(np.zeros((1, batch.spec.action.dim)), batch.spec.action.low, batch.spec.action.high)
        steps, looks = [], []
        for _ in range(_TIMED):
            before = time.perf_counter()
            batch.step([0], idle)
            between = time.perf_counter()
            batch.observe([0], out)
            steps.append(between - before)
            looks.append(time.perf_counter() - between)
    finally:
        batch.close()
    return {
        "spec": as_plain(batch.spec),
        "start_s": start_s,
        "step_ms": 1000 * float(np.median(steps)),
        "observe_ms": 1000 * float(np.median(looks)),
    }


def _answer(given: str) -> dict[str, Any]:
    settings = ManiSkillSettings.model_validate_json(given)
    try:
        return _tried(settings)
    except PolyrhythmError as error:
        return {"problem": str(error), "missing": isinstance(error, MissingError)}
    except ImportError as error:
        install = install_command("maniskill")
        return {"problem": f"env.type = maniskill: {error}; run: {install}", "missing": True}
    except Exception as error:  # noqa: BLE001 - a task of the user, or of ManiSkill, may raise anything
        problem = f"{named_tasks(settings)}: a trial of them {raised(error)}; choose other settings or tasks"
        return {"problem": problem, "missing": False}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_answer(sys.argv[1])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without SAPIEN's clean-up at exit, which some drivers do not survive
