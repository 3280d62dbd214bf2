"""What LIBERO finds of its parts on this machine, for `polyrhythm doctor libero`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from polyrhythm.conformance import Finding, raised
from polyrhythm.envs.mujoco import choose_gl_backend
from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.simulators.libero.library import check_robosuite, find_assets, package_folder

if TYPE_CHECKING:
    from polyrhythm.plugins.simulators.libero.env import LiberoSettings

#: Steps and observations whose median time is reported.
_TIMED = 5
_TRIAL = "a task"


def examine(tried: LiberoSettings) -> Iterator[Finding]:
    """Task files, robosuite's version, assets, a renderer; if all is there, a trial of `tried`."""
    checks: dict[str, Callable[[], object]] = {
        "task files": package_folder,
        "robosuite 1.4": check_robosuite,
        "assets": lambda: find_assets(tried.assets),
        "rendering": choose_gl_backend,
        _TRIAL: lambda: _trial(tried),
    }
    complete = True
    for name, check in checks.items():
        if name == _TRIAL and not complete:
            return
        try:
            yield Finding(name, "ok", str(check() or "a GL library that needs no screen"))
        except PolyrhythmError as error:
            problem, _, fix = str(error).partition("run: ")
            yield Finding(name, "missing", problem.removesuffix(", or ").removesuffix("; "), fix)
            complete = False
        except Exception as error:  # noqa: BLE001 - versions of LIBERO, robosuite and MuJoCo that do not fit raise anything
            yield Finding(name, "failed", raised(error))


def _trial(tried: LiberoSettings) -> str:
    """Make, reset, step and observe one row; what it took."""
    began = time.perf_counter()
    batch = tried.build(1)
    start_s = time.perf_counter() - began
    out = {name: np.zeros((1, *array.shape), array.dtype) for name, array in batch.spec.observation.items()}
    steps, looks = [], []
    try:
        began = time.perf_counter()
        batch.reset([0], [0], [0])
        reset_ms = 1000 * (time.perf_counter() - began)
        for _ in range(_TIMED):
            before = time.perf_counter()
            batch.step([0], np.zeros((1, batch.spec.action.dim), np.float32))
            between = time.perf_counter()
            batch.observe([0], out)
            steps.append(between - before)
            looks.append(time.perf_counter() - between)
    finally:
        batch.close()
    size = tried.image_size
    return (
        f"ready after {start_s:.1f} s; a reset takes {reset_ms:.0f} ms, a step {1000 * np.median(steps):.0f} ms, an "
        f"image of {size}x{size} pixels {1000 * np.median(looks):.0f} ms"
    )
