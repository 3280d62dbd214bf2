"""CPU seconds, as the software itself reads them, and memory with shared pages counted once."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from polyrhythm.plugins.hardware.processor import (
    CpuReading,
    cpu_s,
    cpu_s_of,
    family,
    machine_cpu_s,
    others_cores,
    read_cpu,
)

__all__ = ["CpuReading", "cpu_s", "cpu_s_of", "family", "machine_cpu_s", "others_cores", "pss_mb", "read_cpu"]

_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def pss_mb() -> float:
    """Proportional set size of the family: a page shared by n processes counts 1/n for each (Linux)."""
    kilobytes = 0
    for process in family():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
            kilobytes += int(found[1]) if (found := _PSS.search(text)) else 0
    return kilobytes / 1e3
