"""Observations of open requests in the memory of a simulator's device, which a generator on the same device reads there
(CUDA IPC; a file of the run for a simulated device).

    <folder>/observed/<slot>/block   number of the request that is there, then the handle of the memory
    <folder>/observed/<slot>/lock    held by the simulator's process while it lives

Every observation is copied to the arena when it is made: the trainer and generators elsewhere need nothing of this. A
simulator that leases its device makes no block, as no generator is there with it. Only a generator's way is shorter: no
gathering on the host, and no copy to the device where all rows of a pass are there.

Invariant: the block names a request only from before it is sent until the next one is written, and what it holds equals
the request's entries of the arena to the bit. A reader takes it for a request of that number alone, whose simulator
lives; everything else it takes from the arena.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.errors import first_line
from polyrhythm.runtime.memory.device_weights import Handles, handles_of
from polyrhythm.runtime.memory.published import hold_lock, is_held
from polyrhythm.specs import ArraySpec

log = logging.getLogger(__name__)

_FOLDER, _BLOCK, _LOCK = "observed", "block", "lock"
_HEAD = 8
_ALIGNMENT = 64


class DeviceSeat(NamedTuple):
    """A process's device. folder: of the run on this host; name: of the device in the run; local: torch's name."""

    folder: Path
    name: str
    local: str


class _Named(msgspec.Struct):
    """Content of a block's file. device: its name in the run; arrays: name, dtype and shape of one row."""

    device: str
    rows: int
    arrays: list[tuple[str, str, tuple[int, ...]]]
    handle: bytes


def _views(memory: Tensor, rows: int, arrays: Sequence[tuple[str, str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """Tensors [rows, ...] over the memory, by name."""
    found, offset = {}, 0
    for name, dtype, shape in arrays:
        kind = torch.from_numpy(np.empty(0, dtype)).dtype
        size = rows * int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        found[name] = memory[offset : offset + size].view(kind).view(rows, *shape)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return found


def _nbytes(rows: int, arrays: Mapping[str, ArraySpec]) -> int:
    return sum(-(-rows * array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())


class ObservedBlock:
    """A simulator's end, for one slot of `rows` rows. arrays: specs of one row of its observations.

    RuntimeError: the device's memory cannot be shared.
    """

    def __init__(self, seat: DeviceSeat, slot: str, rows: int, arrays: Mapping[str, ArraySpec]) -> None:
        folder = seat.folder / _FOLDER / slot
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _BLOCK
        self._path.unlink(missing_ok=True)
        # A process that is bound to its device sees that one alone, as the first.
        self._handles: Handles = handles_of(seat.name, folder, "cuda:0" if seat.name.startswith("cuda") else "")
        fields = [(name, array.dtype, tuple(array.shape)) for name, array in arrays.items()]
        memory = self._handles.allocate(_nbytes(rows, arrays))
        self._posted, self._now = _views(memory, rows, fields), _views(torch.zeros_like(memory), rows, fields)
        named = _Named(seat.name, rows, fields, self._handles.export(memory))
        new = self._path.with_suffix(".new")
        new.write_bytes(bytes(_HEAD) + msgspec.msgpack.encode(named))
        self._release = hold_lock(folder / _LOCK, self)
        with new.open("r+b") as file:
            # The request's number plus one; zero for none.
            self._number = np.frombuffer(mmap.mmap(file.fileno(), _HEAD), np.int64)
        new.replace(self._path)
        self._fresh = np.zeros(rows, np.bool_)

    def record(self, rows: NDArray[np.intp], seen: Mapping[str, Tensor]) -> None:
        """Keep the observations [n, ...] of these rows of the slot."""
        at = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
        for name, tensor in seen.items():
            into = self._now[name]
            into.index_copy_(0, at.to(into.device), tensor.to(into.dtype))
        self._fresh[rows] = True

    def post(self, number: int, rows: NDArray[np.intp]) -> None:
        """Write what a request of these rows shows, in their order, before the request is sent."""
        self._number[0] = 0
        if self._fresh[rows].all():
            at = torch.from_numpy(np.ascontiguousarray(rows, np.int64))
            for name, now in self._now.items():
                torch.index_select(now, 0, at.to(now.device), out=self._posted[name][: len(rows)])
            self._handles.wait()
            self._number[0] = number + 1

    def close(self) -> None:
        """Free the memory; readers of it have ended, or read what nobody waits for."""
        self._number[0] = 0
        self._path.unlink(missing_ok=True)
        self._posted, self._now = {}, {}
        for file in self._path.parent.glob("device-*"):  # the memory of a simulated device
            file.unlink()
        self._release()


class ObservedReader:
    """A generator's end, of all slots. rows: how many it has read on the device."""

    def __init__(self, seat: DeviceSeat) -> None:
        self._seat, self.rows = seat, 0
        self._open: dict[str, tuple[int, NDArray[np.int64], dict[str, Tensor]]] = {}
        self._refused: dict[str, int] = {}  # by slot, the inode of a block of another device, or that cannot be opened

    def find(self, slot: str, number: int, rows: int) -> dict[str, Tensor] | None:
        """The observations [rows, ...] of this request; None if they are not on this device."""
        folder = self._seat.folder / _FOLDER / slot
        try:
            inode = (folder / _BLOCK).stat().st_ino
        except FileNotFoundError:
            self._open.pop(slot, None)
            return None
        if inode == self._refused.get(slot) or not is_held(folder / _LOCK):
            return None
        held = self._open.get(slot)
        if held is None or held[0] != inode:
            try:
                opened = self._map(slot, inode)
            except FileNotFoundError:  # it has just left
                return None
            if opened is None:
                return None
            held = self._open[slot] = opened
        _, posted, arrays = held
        if posted[0] != number + 1:
            return None
        self.rows += rows
        return {name: tensor[:rows] for name, tensor in arrays.items()}

    def _map(self, slot: str, inode: int) -> tuple[int, NDArray[np.int64], dict[str, Tensor]] | None:
        folder = self._seat.folder / _FOLDER / slot
        with (folder / _BLOCK).open("r+b") as file:
            if os.fstat(file.fileno()).st_ino != inode:
                return None
            head = np.frombuffer(mmap.mmap(file.fileno(), _HEAD), np.int64)
            named = msgspec.msgpack.decode(file.read()[_HEAD:], type=_Named)
        if named.device != self._seat.name:
            self._refused[slot] = inode
            return None
        handles = handles_of(self._seat.name, folder, self._seat.local)
        try:
            memory = handles.open(named.handle, here=True)
        except RuntimeError as error:
            self._refused[slot] = inode
            why = first_line(error)
            log.warning("observations of %s come from host memory: their memory cannot be opened (%s)", slot, why)
            return None
        if not self._open:
            log.info("observations come from simulators' memory on %s (%s)", handles.name, handles.means)
        return inode, head, _views(memory, named.rows, named.arrays)

    def drop(self) -> None:
        """Close all memory of other processes."""
        self._open.clear()
