"""What the C library does with freed memory, where torch works on the CPU."""

from __future__ import annotations

import ctypes
import os

#: glibc's numbers of what `mallopt` sets, and to what, in this order.
_SETTINGS = {"M_MMAP_THRESHOLD": (-3, 32 << 20), "M_TRIM_THRESHOLD": (-1, 256 << 20), "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> bool:
    """Freed blocks of up to 32 MiB stay with this process, to be used again; whether it is so. Before threads start.

    glibc gives blocks of some megabytes, such as a small policy's activations, back to the system at once, and every
    page of them then costs a fault when the next step asks for them again. The price is memory: what was once in use in
    such blocks is kept. All threads share one heap, since those of others are given back whatever is said here. Where
    the C library is another, or the environment says what the allocator is to do, nothing changes.
    """
    if any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc." in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(number, value) == 1 for number, value in _SETTINGS.values())
