"""Starts the simulator in a process of its own and reports what it offers: `python -m …maniskill.env SETTINGS`.

A broken Vulkan driver can end or hang a process, and ManiSkill writes to stdout and asks on stdin; here neither
reaches the caller. SETTINGS is JSON; the last line of stdout is JSON too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import NamedTuple

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.imports import same_imports
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.plain import from_plain

_PATIENCE_S = 240.0


class Probed(NamedTuple):
    """step_ms, observe_ms: median times of one row; start_s: seconds to import ManiSkill and make the instances."""

    spec: EnvSpec
    start_s: float
    step_ms: float
    observe_ms: float


def probe(settings: ManiSkillFields) -> Probed:
    """Start the simulator once for these settings, and remember what it offers.

    Raises MissingError if a package, asset or driver is missing, ConfigError for an unknown task or setting.
    """
    return _probe(type(settings), settings.model_dump_json(), _machine())


def _machine() -> tuple[str | None, ...]:
    """What of the environment decides whether the simulator starts."""
    return tuple(map(os.environ.get, ("VK_DRIVER_FILES", "VK_ICD_FILENAMES", "CUDA_VISIBLE_DEVICES", "MS_ASSET_DIR")))


@lru_cache(maxsize=32)
def _probe(kind: type[ManiSkillFields], given: str, machine: object) -> Probed:  # noqa: ARG001
    settings = kind.model_validate_json(given)
    what = named_tasks(settings)
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "polyrhythm.plugins.simulators.maniskill.env", given],
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


def named_tasks(settings: ManiSkillFields) -> str:
    return f"env.tasks = {', '.join(settings.tasks)}"
