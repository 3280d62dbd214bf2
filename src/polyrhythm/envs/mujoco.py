"""Shared parts of MuJoCo environments: the choice of the GL backend, and the detection of unstable states.

MuJoCo binds its backend (MUJOCO_GL) at import, so `choose_gl_backend` or `offer_gl_backend` must run first. Speed is
measured with as many concurrent processes as the run has simulators, each `MUJOCO_GL=egl python -m` this module: a GPU
may draw the frames of several one after another, and a broken driver may hang or crash a process. Main chooses before
it starts processes, which inherit MUJOCO_GL. Beyond main's reach, as on cluster nodes, the simulators of a host share
one choice by a file in the run's folder there. Each host of a run thus measures once, except that main's own host is
measured twice if it is a node of a cluster started by `ray start`, and that joining simulators measure for themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from polyrhythm.errors import StartError
from polyrhythm.imports import same_imports

if TYPE_CHECKING:
    import mujoco

log = logging.getLogger(__name__)

#: Environment variable with the run's folder on this host, through which simulators share a choice.
RUN_FOLDER = "POLYRHYTHM_RUN_FOLDER"
#: Maximum number of processes that draw concurrently in a measurement.
_MOST = 16
_SHARED = "gl_backend"

_simulators: ContextVar[int] = ContextVar("simulators", default=0)

_VARIABLE = "MUJOCO_GL"
_LIBRARIES = {"osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"), "egl": ("libEGL.so.1", "libEGL.so")}
#: Values of MUJOCO_GL with which MuJoCo draws: backends, and values that leave the choice to it.
_DRAWING = frozenset({"osmesa", "egl", "glfw", "glx", "cgl", "wgl", "enable", "enabled", "on", "true", "1"})
#: GL backends that need no screen, in order of preference.
BACKENDS = tuple(_LIBRARIES)
_INSTALL = {"osmesa": "apt-get install -y libosmesa6", "egl": "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri"}


class RenderingUnavailable(StartError):
    """This machine cannot render; the message has the command that fixes it."""


def choose_gl_backend() -> None:
    """Set `MUJOCO_GL` if it is not set (Linux).

    osmesa, else egl, by which library loads; with an NVIDIA GPU and both libraries, the measured faster one. The window
    backend is never chosen, even with a display, since it does not allow rendering from other threads.
    RenderingUnavailable: a library is missing; names the command that installs it.
    """
    logging.getLogger("OpenGL.acceleratesupport").setLevel(logging.WARNING)  # logs an optional package at INFO
    chosen = os.environ.get(_VARIABLE, "").lower().strip()
    if chosen and chosen not in _DRAWING:
        raise RenderingUnavailable(f"{_VARIABLE}={chosen}: MuJoCo draws nothing with it; set it to osmesa or egl")
    if not sys.platform.startswith("linux") or (chosen and chosen not in _LIBRARIES):
        return
    if chosen:
        if not is_loadable(chosen):
            raise RenderingUnavailable(f"{_VARIABLE}={chosen}, but its library is missing; run: {_INSTALL[chosen]}")
        return
    able = tuple(backend for backend in _LIBRARIES if is_loadable(backend))
    if not able:
        raise RenderingUnavailable(f"no GL library to render with (tried osmesa and egl); run: {_INSTALL['osmesa']}")
    found = preferred(able)
    if "mujoco" in sys.modules:
        raise RenderingUnavailable(
            f"mujoco was imported before the GL backend was chosen; set {_VARIABLE}={found} in the environment"
        )
    os.environ[_VARIABLE] = found


def offer_gl_backend() -> None:
    """Set `MUJOCO_GL` for environments that may use MuJoCo and render, without measuring and without an error.

    egl with an NVIDIA GPU, else osmesa, by which library loads (Linux). It stays unchanged if it is set, or if MuJoCo
    is missing or already imported.
    """
    if _VARIABLE in os.environ or "mujoco" in sys.modules or not sys.platform.startswith("linux"):
        return
    if importlib.util.find_spec("mujoco") is None:
        return
    able = [backend for backend in BACKENDS if is_loadable(backend)]
    if able:
        os.environ[_VARIABLE] = "egl" if "egl" in able and count_gpus() > 0 else able[0]


def preferred(able: tuple[str, ...]) -> str:
    """The first of these backends; with an NVIDIA GPU the measured faster one."""
    measured = len(able) > 1 and count_gpus() > 0 and "mujoco" not in sys.modules
    return fastest(able) if measured else able[0]


def is_loadable(backend: str) -> bool:
    for library in _LIBRARIES[backend]:
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return True
    return False


def count_gpus() -> int:
    """Number of NVIDIA GPUs that this process may use, counted without loading CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@contextmanager
def set_simulator_count(count: int) -> Iterator[None]:
    """Set, within this block, the number of simulator processes of this machine for which a backend is chosen; 0:
    unknown."""
    token = _simulators.set(count)
    try:
        yield
    finally:
        _simulators.reset(token)


def simulator_count() -> int:
    """Number set by `set_simulator_count`; 0 without one."""
    return _simulators.get()


def processes_at_once() -> int:
    """Number of processes of a measurement: the usable cores, at most 16, and at most the number of simulators if
    known."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST, simulator_count() or _MOST)


def fastest(backends: tuple[str, ...]) -> str:
    """The backend that draws the most frames per second; the first one if none draws.

    A run's simulator uses the result of another simulator on its host, if there is one.
    """
    folder = os.environ.get(RUN_FOLDER)
    if not folder or not Path(folder).is_dir():
        return _measure(backends)
    with (Path(folder) / _SHARED).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if (shared := file.read()) in backends:
            return shared
        chosen = _measure(backends)
        file.write(chosen)
        return chosen


def _measure(backends: tuple[str, ...]) -> str:
    processes = processes_at_once()
    rates = {backend: frames_per_s(backend, processes) for backend in backends}
    chosen = max(rates, key=lambda backend: rates[backend])
    told = ", ".join(f"{name} {f'{rate:.0f} frames/s' if rate else 'draws nothing'}" for name, rate in rates.items())
    log.info("rendering by %s: %s (processes that drew at once: %d)", chosen, told, processes)
    return chosen


class UnstableSimulationError(Exception):
    """MuJoCo found the state unstable and has reset it by itself; the episode is void."""


def instabilities(data: mujoco.MjData) -> int:
    """Number of times that MuJoCo found this state unstable since the last reset by the environment."""
    return int(data.warning.number[_kinds()].sum())


def refuse_unstable(data: mujoco.MjData, when: str, known: int = 0) -> None:
    """Raise UnstableSimulationError if MuJoCo found the state unstable more than `known` times. when: `at step 3`."""
    if instabilities(data) > known:
        raise UnstableSimulationError(f"MuJoCo found the state unstable {when}")


def mujoco_data(env: Any) -> mujoco.MjData | None:
    """`env.data` if it is a MuJoCo state."""
    data, found = getattr(env, "data", None), sys.modules.get("mujoco")
    return data if found is not None and isinstance(data, found.MjData) else None


@cache
def _kinds() -> list[int]:
    """Numbers of the warnings after which MuJoCo resets a state."""
    import mujoco

    kinds = mujoco.mjtWarning
    return [int(kind) for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)]


#: Time limit of one backend's measurement including process start, and drawing time, in seconds.
_LIMIT_S, _DRAW_S = 60.0, 1.0
#: Shapes in the probe's scene, edge of its picture in pixels.
_SHAPES, _SIZE = 150, 128
_READY = b"ready\n"


def frames_per_s(backend: str, processes: int, limit_s: float = _LIMIT_S) -> float:
    """Total frames per second of concurrent processes, from the first one's start to the last one's end.

    0 if one of them cannot start or draw, crashes, or takes longer than `limit_s`.
    """
    until = time.monotonic() + limit_s
    drawers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(processes):  # if one cannot start, the earlier ones are ended below
            drawer = subprocess.Popen(
                [sys.executable, "-m", "polyrhythm.envs.mujoco"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, **same_imports(), _VARIABLE: backend},
            )
            drawers.append(drawer)
        if not all(_line(drawer, until) == _READY for drawer in drawers):
            return 0.0
        for drawer in drawers:
            _pipe(drawer.stdin).write(b"\n")
        drawn = [json.loads(_line(drawer, until)) for drawer in drawers]
        began, ended = min(one["began"] for one in drawn), max(one["ended"] for one in drawn)
        return float(sum(one["frames"] for one in drawn) / (ended - began))
    except (ValueError, OSError):  # no JSON after a crash; no reader; no start
        return 0.0
    finally:
        for drawer in drawers:
            drawer.kill()
        for drawer in drawers:
            drawer.wait()
            with suppress(OSError):
                _pipe(drawer.stdin).close()
            _pipe(drawer.stdout).close()


def _line(drawer: subprocess.Popen[bytes], until: float) -> bytes:
    """The next line; b"" if the process ends or the time limit passes first."""
    pipe = _pipe(drawer.stdout)
    ready, _, _ = select.select([pipe], [], [], max(0.0, until - time.monotonic()))
    return pipe.readline() if ready else b""


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None, "it was asked for"
    return end


def _draw() -> None:
    """Report the first frame, wait for a line, draw, and report the frame count with its times."""
    line = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # for what a driver may print
    import mujoco

    shapes = "".join(
        f'<geom type="ellipsoid" size=".04 .03 .05" pos="{i % 15 / 10:.2f} {i // 15 / 10:.2f} .1"/>'
        for i in range(_SHAPES)
    )
    xml = f"<mujoco><worldbody><light pos='0 0 3'/><geom type='plane' size='2 2 .1'/>{shapes}</worldbody></mujoco>"
    model = mujoco.MjModel.from_xml_string(xml)
    model.vis.quality.offsamples = 0
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, _SIZE, _SIZE)
    renderer.update_scene(data)
    picture = renderer.render()
    if picture.min() == picture.max():
        raise RuntimeError("a frame is blank")
    line.write(_READY)
    if not sys.stdin.buffer.readline():
        return  # the measuring process is gone
    frames, began = 0, time.monotonic()
    while (now := time.monotonic()) < began + _DRAW_S or not frames:
        renderer.update_scene(data)
        renderer.render()
        frames += 1
    line.write(json.dumps({"frames": frames, "began": began, "ended": now}).encode() + b"\n")
    renderer.close()


if __name__ == "__main__":
    _draw()
