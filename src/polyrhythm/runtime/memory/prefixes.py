"""What frozen parts of the policy give for chunk steps (`precompute`), computed once: generators lend it to the trainer
on the same device, which computes only what is missing.

The trainer allocates a pool on its device (CUDA IPC; on the CPU and on a simulated device a file of the run), and
generators there write into it, each the chunk steps that it answers:

    <folder>/prefixes/<device>/pool    random number of the pool; number of slots; of each slot the digest of the
                                       observation that it was computed from, 0 if it is empty, -1 if it is claimed;
                                       then form and handle of the memory
    <folder>/prefixes/<device>/lock    held by the trainer's process while it lives
    <folder>/prefixes/<device>/claims  held by a generator while it claims slots

Slot n belongs to entry n of the arena, so a prefix is lent, and its slot free again, with the entry's block: whoever
trains on, drops or loses a sample need not know of it. A pool has as many slots as its memory holds; entries beyond
have none.

Invariants: a slot that is read has the digest of the reader's own observation, and its pool the frozen tensors of the
reader, by checksum, so its content is what the reader would compute. A slot is written only by the pass that has
claimed it, from before its launch until it has finished; no other pass claims it meanwhile, also if the entry's block
was freed and has another sample by then. What a generator had claimed when it died stays so until the trainer makes
another pool. Nobody waits for a prefix: what is not there is computed. No pass begins to write to the pool of a dead
trainer.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import secrets
import shutil
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.errors import first_line
from polyrhythm.runtime.memory.device_weights import Handles, handles_of
from polyrhythm.runtime.memory.published import hold_lock, is_held, lock_file
from polyrhythm.runtime.memory.tensors import State, as_bytes, views_of
from polyrhythm.specs.weights import WeightsLayout, WeightSpec, weight_specs

log = logging.getLogger(__name__)

_FOLDER, _POOL, _LOCK, _CLAIMS = "prefixes", "pool", "lock", "claims"
_NUMBER = 8  # bytes
_EMPTY, _CLAIMED = 0, -1
#: Bytes of a tensor whose sum is one number of its checksum.
_SUMMED = 1 << 16
#: Tries to claim while another generator claims, which takes microseconds unless it is stopped, and what is between.
_TRIES, _PAUSE_S = 20, 0.0002
#: Pools of this process, by seat.
_HERE: weakref.WeakValueDictionary[tuple[str, str], PrefixPool] = weakref.WeakValueDictionary()


class PrefixSeat(NamedTuple):
    """A process's device. run: the folder of the run on this host, or of a run in one process any name of it alone;
    shared: whether the run has other processes; device: its name in the run; local: torch's name."""

    run: str
    shared: bool
    device: str
    local: str


class _Named(msgspec.Struct):
    """End of a pool's file. frozen: checksum of the frozen tensors; arrays: shape and dtype of one row."""

    frozen: int
    arrays: dict[str, tuple[tuple[int, ...], str]]
    handle: bytes


def row_specs(arrays: State) -> dict[str, WeightSpec]:
    """Form of one row of these arrays [n, ...], n > 0."""
    return weight_specs({name: x[0] for name, x in arrays.items()})


@torch.no_grad()
def frozen_checksum(module: torch.nn.Module, published: Mapping[str, object]) -> int:
    """CRC-32 of the names, forms and sums of the module's tensors that are not `published`."""
    checksum = 0
    frozen = {name: x.detach() for name, x in module.state_dict().items() if name not in published}
    for name, spec in sorted(weight_specs(frozen).items()):
        content = as_bytes(frozen[name])
        whole = len(content) // _SUMMED * _SUMMED
        sums = content[:whole].view(-1, _SUMMED // 8, 8).sum(1, dtype=torch.int64).cpu().numpy()
        for part in (f"{name} {spec}".encode(), sums.tobytes(), content[whole:].cpu().numpy().tobytes()):
            checksum = zlib.crc32(part, checksum)
    return checksum


class PrefixPool:
    """Slots for one row of each array. arrays: name → [slots, ...]; stamps [slots] int64, shared by all processes that
    use the pool; frozen: checksum of the tensors that rows are computed by; claims: excludes other claims, or raises
    BlockingIOError."""

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        slots: int,
        frozen: int,
        memory: Tensor,
        stamps: NDArray[np.int64],
        claims: Callable[[], AbstractContextManager[object]],
    ):
        self.specs, self.slots, self.frozen, self.nbytes = dict(specs), slots, frozen, memory.nbytes
        self.arrays = views_of(_layout(specs, slots), memory)
        self._stamps, self._claims = stamps, claims

    def claim(self, entries: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these entries have a slot that is now the caller's until `stamp`: of equal ones the first, not
        those that a pass still writes, and none if another generator is not done with its claim in milliseconds."""
        inside = np.zeros(len(entries), np.bool_)
        inside[np.unique(entries, return_index=True)[1]] = True
        inside &= (entries >= 0) & (entries < self.slots)
        for _ in range(_TRIES):
            with suppress(BlockingIOError), self._claims():
                free: NDArray[np.bool_] = inside & (self._stamps[np.where(inside, entries, 0)] != _CLAIMED)
                self._stamps[entries[free]] = _CLAIMED
                return free
            time.sleep(_PAUSE_S)
        return np.zeros(len(entries), np.bool_)

    def write(self, places: Tensor, found: State) -> None:
        """Write to claimed slots. places [2, n], on the device: the slots, and the rows of `found` for them."""
        for name, into in self.arrays.items():
            into.index_copy_(0, places[0], found[name].index_select(0, places[1]))

    def stamp(self, entries: NDArray[np.int64], digests: NDArray[np.int64]) -> None:
        """Declare the claimed slots full, with what was computed from rows of these digests."""
        self._stamps[entries] = digests

    def holds(self, entries: NDArray[np.int64], digests: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the slot of each entry is full, with a row of this digest."""
        inside = (entries >= 0) & (entries < self.slots)
        held: NDArray[np.bool_] = inside & (self._stamps[np.where(inside, entries, 0)] == digests)
        return held


def _layout(specs: Mapping[str, WeightSpec], slots: int) -> WeightsLayout:
    return WeightsLayout.of({name: WeightSpec((slots, *spec.shape), spec.dtype) for name, spec in specs.items()})


class Prefixes:
    """A process's end. specs: form of one row of its own arrays; frozen: computes the checksum of its frozen tensors,
    once."""

    def __init__(self, seat: PrefixSeat, specs: Mapping[str, WeightSpec], frozen: Callable[[], int]) -> None:
        self._seat, self._specs, self._frozen = seat, dict(specs), frozen
        self._checksum: int | None = None
        self._folder = Path(seat.run) / _FOLDER / seat.device.replace(":", "-")
        self._own: PrefixPool | None = None
        self._opened: tuple[int, PrefixPool] | None = None
        self._refused = -1  # number of a pool that cannot be opened, or is of other frozen tensors

    @property
    def checksum(self) -> int:
        if self._checksum is None:
            self._checksum = self._frozen()
        return self._checksum

    # ------------------------------------------------------------ the trainer

    def create(self, entries: int, limit: int) -> None:
        """Make the pool of this device, of at most `limit` bytes and half of what is free, for at most `entries`
        entries of the arena. If there is no room, or the memory cannot be shared, the log says so."""
        seat, row = self._seat, _layout(self._specs, 1).nbytes
        for left in self._folder.glob("*"):  # by a trainer that died: who has mapped it keeps it
            left.unlink()
        slots = min(entries, min(limit, self._free() // 2) // row)
        if slots < 1:
            log.warning("prefixes are computed again by the trainer: %s has no room for one", seat.device)
            return
        try:
            pool = self._make(slots)
        except RuntimeError as error:
            why = first_line(error)
            log.warning("prefixes are computed again by the trainer: no memory for them on %s (%s)", seat.device, why)
            return
        self._own = _HERE[seat.run, seat.device] = pool
        mib, of = pool.nbytes / 2**20, f"{slots} of {entries} entries"
        log.info("generators on %s lend prefixes to the trainer: %.0f MiB for %s", seat.device, mib, of)

    def _free(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return shutil.disk_usage(self._seat.run).free if self._seat.shared else 2**63

    @property
    def _device(self) -> torch.device:
        return torch.device(self._seat.local)

    def _make(self, slots: int) -> PrefixPool:
        seat, specs = self._seat, self._specs
        nbytes = _layout(specs, slots).nbytes
        if not seat.shared:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            lock = threading.Lock()
            return PrefixPool(specs, slots, self.checksum, memory, np.full(slots, _EMPTY, np.int64), lambda: lock)
        self._folder.mkdir(parents=True, exist_ok=True)
        path, handles = self._folder / _POOL, self._handles()
        memory = handles.allocate(nbytes)
        arrays = {name: (spec.shape, spec.dtype) for name, spec in specs.items()}
        named = msgspec.msgpack.encode(_Named(self.checksum, arrays, handles.export(memory)))
        new = path.with_suffix(".new")
        head = np.full(2 + slots, _EMPTY, np.int64)
        head[:2] = secrets.randbits(63), slots
        new.write_bytes(head.tobytes() + named)
        with new.open("r+b") as file:
            pool = PrefixPool(specs, slots, self.checksum, memory, _stamps_in(file, slots), self._claims)
        hold_lock(self._folder / _LOCK, pool)
        new.replace(path)
        return pool

    @property
    def _claims(self) -> Callable[[], AbstractContextManager[object]]:
        return partial(lock_file, self._folder / _CLAIMS, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _handles(self) -> Handles:
        # On the CPU too the memory is that of a file.
        device = self._seat.device
        return handles_of(device if device.startswith("cuda") else "sim:0", self._folder, self._seat.local)

    # ------------------------------------------------------------ generators, and ranks on a device of another one

    def find(self) -> PrefixPool | None:
        """The pool of the living trainer on this device, of the same frozen tensors; None: there is none, or this
        process cannot open it."""
        seat = self._seat
        pool = self._own or _HERE.get((seat.run, seat.device))
        if pool is not None or not seat.shared:
            return pool if pool is not None and not self._difference(pool) else None
        try:
            with (self._folder / _POOL).open("r+b") as file:
                number, slots = np.frombuffer(file.read(2 * _NUMBER), np.int64).tolist()
                if number == self._refused:
                    return None
                if not is_held(self._folder / _LOCK):
                    raise FileNotFoundError
                if self._opened is None or self._opened[0] != number:
                    self._opened = number, self._open(file, slots)
        except FileNotFoundError:  # there is none of a living trainer, or it is just being replaced
            self._opened = None
            return None
        except RuntimeError as error:
            self._refuse(number, f"their memory cannot be opened ({first_line(error)})")
            return None
        number, pool = self._opened
        if difference := self._difference(pool):
            self._refuse(number, difference)
            return None
        return pool

    def _difference(self, pool: PrefixPool) -> str:
        if pool.specs != self._specs:
            return "the trainer's have other shapes or dtypes"
        return "the trainer's frozen weights differ" if pool.frozen != self.checksum else ""

    def _refuse(self, number: int, why: str) -> None:
        self._refused, self._opened = number, None
        log.warning("prefixes are not lent on %s: %s", self._seat.device, why)

    def _open(self, file: BinaryIO, slots: int) -> PrefixPool:
        file.seek(_NUMBER * (2 + slots))
        named = msgspec.msgpack.decode(file.read(), type=_Named)
        memory = self._handles().open(named.handle, here=True)
        specs = {name: WeightSpec(shape, dtype) for name, (shape, dtype) in named.arrays.items()}
        log.info("prefixes are lent to the trainer on %s", self._seat.device)
        return PrefixPool(specs, slots, named.frozen, memory, _stamps_in(file, slots), self._claims)


def _stamps_in(file: BinaryIO, slots: int) -> NDArray[np.int64]:
    return np.frombuffer(mmap.mmap(file.fileno(), _NUMBER * (2 + slots)), np.int64)[2:]
