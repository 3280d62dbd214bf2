"""Shared parts of MuJoCo environments: the choice of the GL backend, and the detection of unstable states.

MuJoCo binds its backend (MUJOCO_GL) at import, so `choose_gl_backend` or `offer_gl_backend` must run first. MUJOCO_GL
overrides `env.gl`. Where EGL would draw on a device that generators or a trainer use, speed is measured beside a load
there (`envs.gl_speed`). Main chooses before it starts processes, which inherit MUJOCO_GL. Beyond main's reach, as on
cluster nodes, the simulators of a host share one choice by a file in the run's folder there, and measure alone. Each
host of a run thus measures once, except that main's own host is measured twice if it is a node of a cluster started by
`ray start`, and that joining simulators measure for themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from polyrhythm.env_warnings import warn_once
from polyrhythm.envs.gl_speed import draw, start_load
from polyrhythm.errors import StartError
from polyrhythm.imports import count_cores

if TYPE_CHECKING:
    import mujoco

log = logging.getLogger(__name__)

#: Environment variable with the run's folder on this host, through which simulators share a choice.
RUN_FOLDER = "POLYRHYTHM_RUN_FOLDER"
#: Maximum number of processes that draw concurrently in a measurement.
_MOST = 16
_SHARED = "gl_backend"

#: Values of `env.gl`.
GL = Literal["auto", "egl", "osmesa"]
#: Share of its speed that a load has to keep while EGL draws on its device, for EGL to be chosen.
_KEPT = 0.9


class Drawing(NamedTuple):
    """simulators: number of simulator processes of this machine, 0 if unknown. device: a device, as torch names it, on
    which EGL would draw while a generator or the trainer computes there; "" if there is none."""

    simulators: int = 0
    device: str = ""


_UNKNOWN = Drawing()
_drawing: ContextVar[Drawing] = ContextVar("drawing", default=_UNKNOWN)

_VARIABLE = "MUJOCO_GL"
_LIBRARIES = {"osmesa": ("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"), "egl": ("libEGL.so.1", "libEGL.so")}
#: Values of MUJOCO_GL with which MuJoCo draws: backends, and values that leave the choice to it.
_DRAWING = frozenset({"osmesa", "egl", "glfw", "glx", "cgl", "wgl", "enable", "enabled", "on", "true", "1"})
#: GL backends that need no screen, in order of preference.
BACKENDS = tuple(_LIBRARIES)
_INSTALL = {"osmesa": "apt-get install -y libosmesa6", "egl": "apt-get install -y libegl1 libegl-mesa0 libgl1-mesa-dri"}


class RenderingUnavailable(StartError):
    """This machine cannot render; the message has the command that fixes it."""


def choose_gl_backend(gl: GL = "auto") -> None:
    """Set `MUJOCO_GL` if it is not set (Linux), to `gl` unless that is auto.

    auto: osmesa, else egl, by which library loads; with an NVIDIA GPU and both libraries, the better one by
    measurement. The window backend is never chosen, even with a display, since it does not allow rendering from other
    threads. RenderingUnavailable: a library is missing; names the command that installs it.
    """
    logging.getLogger("OpenGL.acceleratesupport").setLevel(logging.WARNING)  # logs an optional package at INFO
    chosen = os.environ.get(_VARIABLE, "").lower().strip()
    if chosen and chosen not in _DRAWING:
        raise RenderingUnavailable(f"{_VARIABLE}={chosen}: MuJoCo draws nothing with it; set it to osmesa or egl")
    if chosen and gl not in ("auto", chosen):
        warn_once(f"{_VARIABLE}={chosen} is set, so env.gl = {gl} has no effect")
    if not sys.platform.startswith("linux") or (chosen and chosen not in _LIBRARIES):
        return
    named = chosen or (gl if gl != "auto" else "")
    if named and not is_loadable(named):
        what = f"{_VARIABLE}={chosen}" if chosen else f"env.gl = {gl}"
        raise RenderingUnavailable(f"{what}, but its library is missing; run: {_INSTALL[named]}")
    if chosen:
        return
    able = (named,) if named else tuple(backend for backend in _LIBRARIES if is_loadable(backend))
    if not able:
        raise RenderingUnavailable(f"no GL library to render with (tried osmesa and egl); run: {_INSTALL['osmesa']}")
    found = preferred(able)
    if "mujoco" in sys.modules:
        raise RenderingUnavailable(
            f"mujoco was imported before the GL backend was chosen; set {_VARIABLE}={found} in the environment"
        )
    os.environ[_VARIABLE] = found


def offer_gl_backend(gl: GL = "auto") -> None:
    """Set `MUJOCO_GL` for environments that may use MuJoCo and render, without measuring.

    auto: egl with an NVIDIA GPU that nothing else of the run uses, else osmesa, by which library loads (Linux). It
    stays unchanged if it is set, or if MuJoCo is missing or already imported. Else as `choose_gl_backend`.
    """
    if gl != "auto":
        choose_gl_backend(gl)
        return
    if _VARIABLE in os.environ or "mujoco" in sys.modules or not sys.platform.startswith("linux"):
        return
    if importlib.util.find_spec("mujoco") is None:
        return
    able = [backend for backend in BACKENDS if is_loadable(backend)]
    if able:
        on_device = "egl" in able and count_gpus() > 0 and not drawing().device
        os.environ[_VARIABLE] = "egl" if on_device else able[0]


def preferred(able: tuple[str, ...]) -> str:
    """The first of these backends; with an NVIDIA GPU the better one by measurement."""
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
def set_drawing(drawing: Drawing) -> Iterator[None]:
    """Set, within this block, where simulators would draw for which a backend is chosen."""
    token = _drawing.set(drawing)
    try:
        yield
    finally:
        _drawing.reset(token)


def drawing() -> Drawing:
    """What `set_drawing` has set."""
    return _drawing.get()


def processes_at_once() -> int:
    """Number of processes of a measurement: the usable cores, at most 16, and at most the number of simulators if
    known."""
    return min(count_cores(), _MOST, drawing().simulators or _MOST)


def fastest(backends: tuple[str, ...]) -> str:
    """The backend that is better by measurement (`better_backend`).

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


def better_backend(rates: Mapping[str, float], kept: float | None = None) -> str:
    """The backend of the most frames per second; the first one if none draws.

    kept: share of its speed that a device keeps which computes while EGL draws on it; None: none does. Below 0.9 EGL is
    taken only if no other backend draws.
    """
    spares = kept is None or kept >= _KEPT
    free = {name: rate for name, rate in rates.items() if rate > 0 and (spares or name != "egl")}
    known = free or rates
    return max(known, key=lambda backend: known[backend])


def _measure(backends: tuple[str, ...]) -> str:
    processes, device = processes_at_once(), drawing().device
    drawn = {name: draw(name, processes) for name in backends if name != "egl" or not device}
    kept: float | None = None
    beside = ""
    if device and "egl" in backends:
        with start_load(device) as load:
            drawn["egl"] = draw("egl", processes)
            # Alone: the second after it. Without a load nothing is known, and the cores are preferred.
            kept = load.share_kept(drawn["egl"]) if load is not None else 0.0
        beside = f"; {device}, which computes for the run, kept {kept:.2f} of its speed while EGL drew"
        beside = beside if load is not None else f"; {device} computes for the run, and no load could be tried there"
    rates = {name: drawn[name].frames_per_s for name in backends}
    chosen = better_backend(rates, kept)
    told = ", ".join(f"{name} {f'{rate:.0f} frames/s' if rate else 'draws nothing'}" for name, rate in rates.items())
    log.info("rendering by %s: %s (processes that drew at once: %d%s)", chosen, told, processes, beside)
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
