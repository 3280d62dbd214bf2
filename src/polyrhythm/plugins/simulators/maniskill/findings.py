"""What ManiSkill finds of drivers and GPUs on this machine, for `polyrhythm doctor maniskill`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polyrhythm.conformance import Finding
from polyrhythm.envs.mujoco import count_gpus
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.simulators.maniskill.drivers import how_to_get_driver, vulkan_manifests
from polyrhythm.plugins.simulators.maniskill.probe import probe

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.maniskill.settings import ManiSkillSettings


def examine(tried: ManiSkillSettings) -> Iterator[Finding]:
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


def _trial(tried: ManiSkillSettings) -> Finding:
    name = tried.tasks[0]
    try:
        seen = probe(tried)
    except PolyrhythmError as error:
        problem, _, fix = str(error).partition("; run: ")
        return Finding(name, "missing", problem, fix)
    height, width = tried.picture
    frame = f"a frame of {width}x{height} pixels {seen.observe_ms:.0f} ms"
    return Finding(name, "ok", f"ready after {seen.start_s:.1f} s; a step takes {seen.step_ms:.1f} ms, {frame}")
