"""Starts the simulator in a process of its own and reports what it offers: `python -m …maniskill.probe SETTINGS`.

A broken Vulkan driver can end or hang a process, and ManiSkill writes to stdout and asks on stdin; here neither
reaches the caller. SETTINGS is JSON; the last line of stdout is JSON too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError, install_command
from polyrhythm.imports import same_imports
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.plain import as_plain, from_plain

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillSettings

_PATIENCE_S = 240.0
#: Steps and observations whose median time is reported.
_TIMED = 5


class Probed(NamedTuple):
    """step_ms, observe_ms: median times of one row; start_s: seconds to import ManiSkill and make the instances."""

    spec: EnvSpec
    start_s: float
    step_ms: float
    observe_ms: float


def probe(settings: ManiSkillSettings) -> Probed:
    """Start the simulator once for these settings, and remember what it offers.

    Raises MissingError if a package, asset or driver is missing, ConfigError for an unknown task or setting.
    """
    return _probe(type(settings), settings.model_dump_json(), _machine())


def _machine() -> tuple[str | None, ...]:
    """What of the environment decides whether the simulator starts."""
    return tuple(map(os.environ.get, ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "CUDA_VISIBLE_DEVICES", "MS_ASSET_DIR")))


@lru_cache(maxsize=32)
def _probe(kind: type[ManiSkillSettings], given: str, machine: object) -> Probed:  # noqa: ARG001
    settings = kind.model_validate_json(given)
    what = _tasks(settings)
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "polyrhythm.plugins.simulators.maniskill.probe", given],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **same_imports()},
        )
    except subprocess.TimeoutExpired as error:
        raise MissingError(
            f"{what}: ManiSkill did not start within {_PATIENCE_S:.0f} s; run: polyrhythm doctor maniskill"
        ) from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        told = " ".join(done.stderr.split())[-300:]
        raise MissingError(
            f"{what}: ManiSkill ended its process with status {done.returncode} ({told or 'it printed nothing'}); "
            "install another Vulkan driver, see: polyrhythm doctor maniskill"
        )
    answer = json.loads(lines[-1])
    if "problem" in answer:
        raise (MissingError if answer["missing"] else ConfigError)(answer["problem"])
    return Probed(from_plain(answer["spec"]), answer["start_s"], answer["step_ms"], answer["observe_ms"])


def _tasks(settings: ManiSkillSettings) -> str:
    return f"env.tasks = {', '.join(settings.tasks)}"


def _tried(settings: ManiSkillSettings) -> dict[str, Any]:
    """Make a batch of one row, step and observe it."""
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
    from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillSettings as Settings

    settings = Settings.model_validate_json(given)
    try:
        return _tried(settings)
    except PolyrhythmError as error:
        return {"problem": str(error), "missing": isinstance(error, MissingError)}
    except ImportError as error:
        install = install_command("maniskill")
        return {"problem": f"env.type = maniskill: {error}; run: {install}", "missing": True}
    except Exception as error:  # noqa: BLE001 - a task of the user, or of ManiSkill, may raise anything
        problem = f"{_tasks(settings)}: a trial of them {raised(error)}; choose other settings or tasks"
        return {"problem": problem, "missing": False}


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(_answer(sys.argv[1])) + "\n")
    sys.stdout.flush()
    os._exit(0)  # without SAPIEN's clean-up at exit, which some drivers do not survive
