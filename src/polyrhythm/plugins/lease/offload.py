"""Storage for a station's tensors while it is off its leased device: host memory, or, for CPU tensors, a file.

CUDA: the bytes go to pinned host memory, which is reused the next time, and the device memory is freed. Tensors come
back at other addresses, so CUDA graphs must be captured anew.

CPU (tests without a GPU): the bytes go to an unnamed file, which ends with the process, and the pages are freed. The
addresses stay reserved, so tensors come back where they were, and views, arrays and pointers stay valid. Only private,
writable memory is moved, in whole pages.

A simulator's process keeps nothing here and may lack torch, so torch is imported when tensors move.

Invariant: between `suspend` and `resume` nothing reads or writes the tensors; after `resume` every bit is as before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.messages import OffloadStore

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_MADV_DONTNEED = 4


def open_store(device: str, folder: str) -> OffloadStore:
    """The store for this device. folder: for CPU tensors; where it is "", or another node's alone, they go to the
    system's temporary folder."""
    if device.startswith("cuda"):
        return DeviceStore(device)
    return FileStore(Path(folder) if folder and Path(folder).is_dir() else Path(tempfile.gettempdir()))


class DeviceStore:
    """Tensors of a CUDA device, stored in pinned host memory."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._pinned: dict[int, Tensor] = {}
        self._away: list[tuple[torch.UntypedStorage, Tensor, int]] = []

    def suspend(self, tensors: Iterable[Tensor]) -> int:
        import torch

        before = torch.cuda.memory_allocated(self._device)
        kept, self._pinned = self._pinned, {}  # memory of tensors that are no longer moved is freed
        for storage in _storages(tensors, "cuda"):
            size, key = storage.nbytes(), storage._cdata
            host = kept.get(key)
            if host is None or host.numel() != size:
                host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            self._pinned[key] = host
            host.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage), non_blocking=True)
            self._away.append((storage, host, size))
        torch.cuda.synchronize(self._device)
        for storage, _, _ in self._away:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_allocated(self._device)

    def resume(self) -> None:
        import torch

        away, self._away = self._away, []
        for storage, host, size in away:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage).copy_(host, non_blocking=True)
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self._pinned.clear()


class FileStore:
    """CPU tensors, stored in an unnamed file in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._away: list[tuple[int, int]] = []  # address and size, in the order of the file

    def suspend(self, tensors: Iterable[Tensor]) -> int:
        """As in `OffloadStore`. RunHalted: the folder lacks room; nothing has been freed then."""
        assert not self._away, "they are away already"
        places = list(_private_pages(_storages(tensors, "cpu")))
        try:
            file = self._file = self._file or tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - until the end
            file.seek(0)
            for address, size in places:
                file.write(_memory(address, size))
            file.flush()
        except OSError as error:
            with suppress(OSError):  # closing tries to write the rest of its buffer
                self.close()
            self._file = None
            raise RunHalted(
                f"placement.sharing = lease: {sum(size for _, size in places)} bytes of a station cannot be put into "
                f"{self._folder} ({error.strerror}); make room there"
            ) from error
        libc = ctypes.CDLL(None, use_errno=True)
        for address, size in places:
            if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_DONTNEED):
                number = ctypes.get_errno()
                raise OSError(number, f"madvise: {os.strerror(number)}")
        self._away = places
        return sum(size for _, size in places)

    def resume(self) -> None:
        away, self._away = self._away, []
        if not away:
            return
        assert self._file is not None, "it was written"
        self._file.seek(0)
        for address, size in away:
            if self._file.readinto(_memory(address, size)) != size:  # type: ignore[attr-defined]
                raise OSError(f"the file with a station's memory in {self._folder} is shorter than it was")
        self._file.truncate(0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _storages(tensors: Iterable[Tensor], kind: str) -> list[torch.UntypedStorage]:
    """The distinct storages on devices of this kind."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == kind:
            storage = tensor.untyped_storage()
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _private_pages(storages: Iterable[torch.UntypedStorage]) -> Iterable[tuple[int, int]]:
    """Address and size of the whole private pages of each storage, not shared with a process or file."""
    regions = private_regions()
    starts = [first for first, _ in regions]
    for storage in storages:
        first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        index = bisect_right(starts, first) - 1
        if first < stop and index >= 0 and stop <= regions[index][1]:
            yield first, stop - first


def private_regions() -> list[tuple[int, int]]:
    """(begin, end) of this process's private, writable, anonymous memory, ascending; neighbours are merged."""
    regions: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        places, rights, _, _, inode = line.split(maxsplit=5)[:5]
        first, stop = (int(place, 16) for place in places.split("-"))
        if rights.startswith("rw") and rights.endswith("p") and inode == "0":
            if regions and regions[-1][1] == first:
                first = regions.pop()[0]
            regions.append((first, stop))
    return regions


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
