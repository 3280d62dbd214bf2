"""What a process and everything it started use: CPU seconds, and memory with shared pages counted once."""

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
    times = [process.cpu_times() for process in family()]
    return sum(time.user + time.system for time in times)


def pss_mb() -> float:
    """Proportional set size of the family: a page shared by n processes counts 1/n for each (Linux)."""
    pages = [Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii") for process in family()]
    return sum(int(found[1]) for text in pages if (found := _PSS.search(text))) / 1e3
