"""What ManiSkill needs of the machine besides its package: a Vulkan driver, and a GPU for its GPU backend.
`findings` says which of them are there.

SAPIEN, ManiSkill's simulator, makes materials on a Vulkan device, so that a driver is needed even where nothing is
drawn. On a machine without a GPU Mesa's software driver (lavapipe) serves; Mesa 22.3 is refused by SAPIEN 3.0.3.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.conformance import Finding
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.simulators.maniskill.probe import probe

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillFields

#: Parts of SAPIEN's messages where no driver serves.
_NO_DRIVER = ("failed to find a rendering device", "failed to find a supported physical device", "vk::", "vulkan")
#: Variables that name the manifests of drivers, the one that wins first.
_VARIABLES = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
#: Folders in which Vulkan looks for drivers.
_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
_PAGE = "docs/simulators/maniskill.md"


def is_about_driver(message: str) -> bool:
    """Whether this is SAPIEN's message where it finds no Vulkan driver that serves."""
    return any(part in message.lower() for part in _NO_DRIVER)


def vulkan_manifests() -> list[str]:
    """The files that tell Vulkan of its drivers: those named in the environment, else those installed."""
    if name := _variable():
        return [file for file in os.environ[name].split(os.pathsep) if Path(file).is_file()]
    return [str(file) for folder in _FOLDERS if Path(folder).is_dir() for file in sorted(Path(folder).glob("*.json"))]


def how_to_get_driver() -> str:
    """The command with which this machine gets a Vulkan driver that serves."""
    if (name := _variable()) and not vulkan_manifests():
        return f"unset {name}  # {os.environ[name]} is no file"
    root = "" if os.getuid() == 0 else "sudo "
    if _codename() == "bookworm":
        line = "deb http://deb.debian.org/debian bookworm-backports main"
        return (
            f"echo '{line}' | {root}tee /etc/apt/sources.list.d/backports.list && {root}apt-get update && "
            f"{root}apt-get install -y -t bookworm-backports mesa-vulkan-drivers"
        )
    return f"{root}apt-get install -y mesa-vulkan-drivers  # Mesa 25 is known to work, 22.3 not to; {_PAGE}"


def _variable() -> str:
    """The variable of the environment that names drivers, "" if none does."""
    return next((name for name in _VARIABLES if os.environ.get(name)), "")


def _codename() -> str:
    """Name of the Debian or Ubuntu release, "" where it is unknown."""
    release = Path("/etc/os-release")
    if not release.is_file():
        return ""
    lines = release.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")


def examine(tried: ManiSkillFields) -> Iterator[Finding]:
    """Vulkan drivers, a trial of `tried` in another process, and GPUs; one after the other as they are known."""
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
