"""CPU seconds of one process, a process tree or the machine, and memory with shared pages counted once."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

import psutil

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def family() -> list[psutil.Process]:
    """This process, and all its descendants."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def cpu_s() -> float:
    """CPU seconds of the family so far, in user and system mode."""
    return sum(map(cpu_s_of, family()))


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


def pss_mb() -> float:
    """Proportional set size of the family: a page shared by n processes counts 1/n for each (Linux)."""
    pages = [Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii") for process in family()]
    return sum(int(found[1]) for text in pages if (found := _PSS.search(text))) / 1e3
