"""Chooses the faster of MuJoCo's GL backends, by what as many processes draw at once as a run has simulators.

Main chooses before it starts anything, and what it starts gets its choice in MUJOCO_GL. Where main's choice does not
reach, as on a cluster's nodes, a host's simulators share one choice by a file in the run's folder there. So a run
measures once on each of its hosts, with two exceptions. Main's own host, if it is a node of a cluster that `ray start`
has begun, is measured twice, since that cluster's actors do not get main's variables: its simulators may choose another
backend than main. And simulators that join measure each for itself.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from polyrhythm.plugins.simulators.gl_probe import frames_per_s

log = logging.getLogger(__name__)

#: Variable that names the run's folder on this host, where simulators share a choice.
RUN_FOLDER = "POLYRHYTHM_RUN_FOLDER"
#: Most processes that draw at once in a measurement.
_MOST = 16
_SHARED = "gl_backend"

_simulators: ContextVar[int] = ContextVar("simulators", default=0)


@contextmanager
def set_simulator_count(count: int) -> Iterator[None]:
    """Set for a block how many simulator processes of this machine a backend is chosen for; 0: that is not known."""
    token = _simulators.set(count)
    try:
        yield
    finally:
        _simulators.reset(token)


def simulator_count() -> int:
    """The number that `set_simulator_count` has set; 0 without it."""
    return _simulators.get()


def processes_at_once() -> int:
    """Processes of a measurement: one for each core that this process may use, at most 16 and at most one for each
    simulator, where their number is known."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST, simulator_count() or _MOST)


def fastest(backends: tuple[str, ...]) -> str:
    """The backend that draws the most frames per second; the first one if none can draw. In a run's simulator it is
    what another one of this host has measured, if any has."""
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
