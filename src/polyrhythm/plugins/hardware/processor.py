"""CPU seconds of one process, of a process tree or of the machine, and the cores that others use."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import NamedTuple

import psutil


def family() -> list[psutil.Process]:
    """This process, and all its descendants."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def cpu_s() -> float:
    """CPU seconds of the family so far, in user and system mode; a process that has just ended counts no more."""
    spent = 0.0
    for process in family():
        with suppress(psutil.NoSuchProcess):
            spent += cpu_s_of(process)
    return spent


def cpu_s_of(process: psutil.Process) -> float:
    """CPU seconds of one process so far, in user and system mode, without its children."""
    times = process.cpu_times()
    return times.user + times.system


def machine_cpu_s() -> float:
    """CPU seconds of everything on this machine so far; time stolen by a hypervisor included."""
    times: dict[str, float] = psutil.cpu_times()._asdict()
    others = ("idle", "iowait", "guest", "guest_nice")  # guests are in user and nice already
    return sum(spent for name, spent in times.items() if name not in others)


class CpuReading(NamedTuple):
    """When, and CPU seconds of the machine and of the family so far."""

    at: float
    machine_s: float
    own_s: float


def read_cpu() -> CpuReading:
    """Now."""
    return CpuReading(time.monotonic(), machine_cpu_s(), cpu_s())


def others_cores(begin: CpuReading, end: CpuReading) -> float:
    """Cores that everything else on the machine used in between."""
    spent = (end.machine_s - begin.machine_s) - (end.own_s - begin.own_s)
    return max(0.0, spent / (end.at - begin.at))
