"""Settings of a process: its cores, where it finds modules, and how it keeps freed memory."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

#: The folder in which this package is found.
SOURCE = str(Path(__file__).parents[1])


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def same_imports() -> dict[str, str]:
    """Environment variable with which another process finds the modules of this one, including changes of `sys.path`.

    The current folder, which `python -c` and `-m` put first, is not included.
    """
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_module(module: str, argument: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one of our modules in a process of its own, with this interpreter and these environment variables besides.
    TimeoutExpired: it has not ended after this time."""
    import subprocess

    return subprocess.run(  # noqa: S603 - our own module
        [sys.executable, "-m", module, argument],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **same_imports(), **environment},
    )


#: Parameters of glibc's `mallopt`: name → (number of the parameter, value).
_SETTINGS = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20), "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> bool:
    """Keep freed blocks of up to 32 MiB in this process for reuse; True if that was set. Call it before threads start.

    By default glibc returns blocks of some megabytes, such as a small policy's activations, to the system at once; the
    next step then pays a page fault for each page of them. The price is memory: the process keeps its peak. All threads
    share one heap, because glibc trims other heaps whatever is set here. Nothing changes where the C library is not
    glibc, or where the environment sets the allocator (MALLOC_…, GLIBC_TUNABLES).
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, value) == 1 for number, value in _SETTINGS.values())
