"""CPU seconds of one process, a process tree or the machine, and memory with shared pages counted once."""

from __future__ import annotations

import re
from pathlib import Path

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


def pss_mb() -> float:
    """Proportional set size of the family: a page shared by n processes counts 1/n for each (Linux)."""
    pages = [Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii") for process in family()]
    return sum(int(found[1]) for text in pages if (found := _PSS.search(text))) / 1e3
