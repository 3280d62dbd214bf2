"""What the C library does with freed memory, where torch works on the CPU."""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT = 256 << 20
_FROM_HEAP = 32 << 20


def keep_freed_memory() -> bool:
    """Blocks of up to 32 MiB come from this process's heap, where up to 256 MiB of freed ones stay; whether it is so.

    glibc gives blocks of some megabytes, such as a small policy's activations, back to the system at once, and every
    page of them then costs a fault when the next step asks for them again. Elsewhere, and where the environment says
    what the allocator is to do (`MALLOC_…`, `GLIBC_TUNABLES`), nothing changes.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(
        [mallopt(_MMAP_THRESHOLD, _FROM_HEAP) == 1, mallopt(_TRIM_THRESHOLD, _KEPT) == 1]
    )
