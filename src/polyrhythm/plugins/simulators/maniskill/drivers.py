"""ManiSkill's requirements of the machine besides its package: a Vulkan driver, and a GPU for its GPU backend.

`probe` starts the simulator in a separate process, `python -m …maniskill.env SETTINGS`: a broken Vulkan driver may
crash or hang a process, and ManiSkill uses stdout and stdin. SETTINGS is JSON, and so is the last line of stdout.

SAPIEN, ManiSkill's simulator, creates materials on a Vulkan device, so it needs a driver even without rendering.
Without a GPU, Mesa's software driver (lavapipe) works; SAPIEN 3.0.3 does not accept Mesa 22.3.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from polyrhythm.conformance import Finding
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.errors import ConfigError, MissingError, PolyrhythmError
from polyrhythm.imports import same_imports
from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields
from polyrhythm.specs import EnvSpec
from polyrhythm.specs.plain import from_plain

#: Parts of SAPIEN's messages where no driver serves.
_NO_DRIVER = ("failed to find a rendering device", "failed to find a supported physical device", "vk::", "vulkan")
#: Variables that name the manifests of drivers, the one that wins first.
_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
#: Folders in which Vulkan looks for drivers.
_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
_PAGE = "docs/simulators/maniskill.md"


def is_about_driver(message: str) -> bool:
    """Whether this is SAPIEN's message about a missing or unsuitable Vulkan driver."""
    return any(part in message.lower() for part in _NO_DRIVER)


def vulkan_manifests() -> list[str]:
    """Vulkan's driver manifests: those named in the environment, else the installed ones."""
    if name := _variable():
        return [file for file in os.environ[name].split(os.pathsep) if Path(file).is_file()]
    return [str(file) for folder in _FOLDERS if Path(folder).is_dir() for file in sorted(Path(folder).glob("*.json"))]


def how_to_get_driver() -> str:
    """The command that installs a suitable Vulkan driver on this machine."""
    if (name := _variable()) and not vulkan_manifests():
        return f"unset {name}  # {os.environ[name]} is not a file"
    root = "" if os.getuid() == 0 else "sudo "
    if _codename() == "bookworm":
        line = "deb http://deb.debian.org/debian bookworm-backports main"
        return (
            f"echo '{line}' | {root}tee /etc/apt/sources.list.d/backports.list && {root}apt-get update && "
            f"{root}apt-get install -y -t bookworm-backports mesa-vulkan-drivers"
        )
    return f"{root}apt-get install -y mesa-vulkan-drivers  # Mesa 25 is known to work, 22.3 not to; {_PAGE}"


def _variable() -> str:
    """The environment variable that names drivers, "" if none is set."""
    return next((name for name in _VARIABLES if os.environ.get(name)), "")


def _codename() -> str:
    """Codename of the Debian or Ubuntu release, "" if unknown."""
    release = Path("/etc/os-release")
    if not release.is_file():
        return ""
    lines = release.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")


def examine(tried: ManiSkillFields) -> Iterator[Finding]:
    """Findings on Vulkan drivers, a trial run of `tried` in another process, and GPUs, as they become known."""
    manifests = vulkan_manifests()
    if manifests:
        yield Finding("Vulkan drivers", "ok", ", ".join(manifests))
    else:
        yield Finding("Vulkan drivers", "missing", "none is found; a state needs one too", how_to_get_driver())
    gpus = count_gpus()
    if gpus:
        yield Finding("GPU", "ok", f"{gpus} for backend: gpu, which was never run")
    else:
        yield Finding("GPU", "ok", "none: backend: cpu (backend: gpu needs one)")
    yield _trial(tried)


def _trial(tried: ManiSkillFields) -> Finding:
    name = tried.tasks[0]
    try:
        seen = probe(tried)
    except PolyrhythmError as error:
        problem, _, fix = str(error).partition("; run: ")
        return Finding(name, "missing", problem, fix)
    height, width = tried.picture
    frame = f"a frame of {width}x{height} pixels {seen.observe_ms:.0f} ms"
    return Finding(name, "ok", f"ready after {seen.start_s:.1f} s; a step takes {seen.step_ms:.1f} ms, {frame}")


_PATIENCE_S = 240.0


class Probed(NamedTuple):
    """step_ms, observe_ms: median times of one row; start_s: seconds to import ManiSkill and make the instances."""

    spec: EnvSpec
    start_s: float
    step_ms: float
    observe_ms: float


def probe(settings: ManiSkillFields) -> Probed:
    """Start the simulator once with these settings and return its spec data; cached.

    MissingError: a package, asset or driver is missing; ConfigError: an unknown task or setting.
    """
    return _probe(type(settings), settings.model_dump_json(), _machine())


def _machine() -> tuple[str | None, ...]:
    """Environment variables that affect whether the simulator starts; part of the cache key."""
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
