"""Published weights without a tensor library: the way that they take, their memory as bytes, and their counters.

    reference   within one process: the publication itself, which is a copy, in memory of the trainer's device if that
                has one
    host        through the memory that the host's processes share; for a generator on a device, then through pinned
                memory
    ipc         from the trainer's device memory, which a generator on the same device has opened (CUDA IPC)
    peer        the same memory, copied by a generator on another device that can read it (NVLink or PCIe)
    tcp         from the trainer's host to the generator's, once for each host, then through its shared memory
    pair        from the trainer's host to a generator's device on another, in buckets over a process group of the two

The way depends on where the two ends are and nothing else: every process decides for itself, and all of them alike.
docs/design/memory-and-devices.md says why no way is a collective. The shared memory is a header and two equal buffers:

    header   version + 1 in each buffer (0: empty), then the number of its publication
    buffer   one version, as a `WeightsLayout` places its tensors

A buffer is written under an exclusive lock of its file and read under a shared one (flock). A process that dies
releases its lock. Counters, which a station's heartbeat carries:

    weights/<way>/versions, bytes, s    taken by a generator, by the way that they came
    weights/published/versions, …       made readable by the trainer
    weights/shards/versions, …          the same, written by all ranks of a sharded trainer together
    weights/<way>/from/<host>           bytes that this host sent, of versions that came over hosts
    weights/apply/versions, …           brought into the module; meanwhile nothing is served
"""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from polyrhythm.runtime.devices import CPU
from polyrhythm.specs.weights import WeightsLayout

Way = Literal["reference", "host", "ipc", "peer", "tcp", "pair"]

#: Whether the first device (cuda:N) can read the memory of the second.
Reaches = Callable[[str, str], bool]


class Choice(NamedTuple):
    """The way of versions to one generator. why: a clause for the log."""

    way: Way
    why: str


@dataclass(frozen=True, slots=True)
class Ends:
    """Where weights are published and where they are used, as devices of the run (cpu, cuda:N or sim:N).

    trainer: of its first rank, which publishes; cpu where main does. generators: of all that are on its node.
    host_only: why the trainer keeps no whole version on its device, a clause; "" if it may. local: the names that
    these devices have on their node, where they differ. pairs: whether versions may cross between devices of hosts.
    one_process: the trainer and all generators are in one process, on one device.
    """

    trainer: str = CPU
    generators: tuple[str, ...] = ()
    host_only: str = ""
    local: Mapping[str, str] = field(default_factory=dict)
    pairs: bool = True
    one_process: bool = False


#: Why versions come by the ways between hosts.
OVER_HOSTS = {
    "tcp": "the trainer is on another host",
    "pair": "the trainer is on a device of another host",
}
ONE_PROCESS = Choice("reference", "trainer and generator are in one process")


def choose_way(ends: Ends, generator: str, reaches: Reaches) -> Choice:
    """The way to a generator on this device, in another process on the trainer's host or in its process.

    Example: trainer on cuda:0, generator on cuda:1, which can read cuda:0: peer.
    """
    trainer = ends.trainer
    if generator == CPU:
        return Choice("host", "the generator is on the CPU")
    if trainer == CPU:
        return Choice("host", "weights are published by a process on the CPU")
    if ends.host_only:
        return Choice("host", ends.host_only)
    if ends.one_process:
        return ONE_PROCESS
    if generator == trainer:
        return Choice("ipc", f"trainer and generator are on {trainer}")
    if reaches(generator, trainer):
        return Choice("peer", f"{generator} can read the memory of {trainer}")
    return Choice("host", f"{generator} cannot read the memory of {trainer}")


def keeps_copy(ends: Ends, reaches: Reaches) -> bool:
    """Whether the trainer keeps the newest version on its device, because a generator takes it from there."""
    return any(choose_way(ends, device, reaches).way in ("reference", "ipc", "peer") for device in ends.generators)


_HEADER = 64
EMPTY = -1


#: Locks a buffer, see `lock_file`.
Lock = Callable[[int, int], BinaryIO]


class PublishedMemory:
    """`memory` has `shared_nbytes(layout)` bytes, zero when new; folder: where the buffers' lock files are.

    stored, numbers: the header's; buffers: the bytes of each."""

    def __init__(self, layout: WeightsLayout, memory: memoryview | bytearray, folder: Path) -> None:
        view = memoryview(memory)
        # Versions are stored plus one, so that zeroed memory is empty.
        self.stored = np.frombuffer(view, np.int64, 2)
        self.numbers = np.frombuffer(view, np.int64, 2, self.stored.nbytes)
        size = layout.nbytes
        self.buffers = [view[_HEADER + i * size : _HEADER + (i + 1) * size] for i in range(2)]
        self._files = [folder / f"weights.{index}.lock" for index in range(2)]

    def versions(self) -> tuple[int, int]:
        """What the two buffers hold, -1 for nothing."""
        return int(self.stored[0]) - 1, int(self.stored[1]) - 1

    def held(self) -> dict[int, int]:
        """Number of the publication of each version that can be read."""
        found = zip(self.versions(), self.numbers.tolist(), strict=True)
        return {version: number for version, number in found if version != EMPTY}

    @contextmanager
    def writing(self, version: int, lock: Lock | None = None) -> Iterator[int]:
        """The buffer to overwrite, empty until this ends without an error, then `version`. lock: in place of `lock`."""
        held = self.versions()
        index = held.index(max(held)) if max(held) >= version else held.index(min(held))
        with (lock or self.lock)(index, fcntl.LOCK_EX):
            self.stored[index] = 0
            self.numbers[index] = self.numbers.max() + 1
            yield index
            self.stored[index] = version + 1

    def lock(self, index: int, operation: int) -> BinaryIO:
        return lock_file(self._files[index], operation)

    def find_part(self, version: int, number: int, part: slice) -> memoryview | None:
        """These bytes of a publication where they lie; None if it is gone. They are its bytes if `has` says so after
        they were read."""
        index = self._index_of(version, number)
        return self.buffers[index][part] if index is not None else None

    def has(self, version: int, number: int) -> bool:
        """Whether this publication is there, and nobody is about to overwrite it."""
        index = self._index_of(version, number)
        if index is None:
            return False
        try:
            file = self.lock(index, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with file:
            return self._index_of(version, number) == index

    def _index_of(self, version: int, number: int) -> int | None:
        """The buffer that holds this publication; None if none does."""
        for index, held in enumerate(self.versions()):
            if held == version and int(self.numbers[index]) == number:
                return index
        return None


def lock_file(path: Path, operation: int) -> BinaryIO:
    """Lock a file until the one that this returns is closed. BlockingIOError: with LOCK_NB it is locked.

    Each use opens the file anew, so threads of a process exclude each other too.
    """
    file = path.open("ab")
    try:
        fcntl.flock(file, operation)
    except BaseException:
        file.close()
        raise
    return file


def hold_lock(path: Path, owner: object) -> weakref.finalize[[int], object]:
    """Lock a file as long as `owner` and its process live, or until what this returns is called."""
    with lock_file(path, fcntl.LOCK_EX) as lock:
        return weakref.finalize(owner, os.close, os.dup(lock.fileno()))


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock; the kernel releases it when its process ends."""
    try:
        lock_file(path, fcntl.LOCK_SH | fcntl.LOCK_NB).close()
    except BlockingIOError:
        return True
    return False


def shared_nbytes(layout: WeightsLayout) -> int:
    return _HEADER + 2 * layout.nbytes


_PREFIX = "weights"
PUBLISHED, SHARDS, APPLY = "published", "shards", "apply"


@dataclass(slots=True)
class Moved:
    """Versions, their bytes, and the seconds that they took. sources: bytes by the host that sent them, if they came
    over hosts."""

    versions: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second; 0 before anything was moved."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def mb(self) -> float:
        """10^6 bytes of one version in the mean; 0 before the first."""
        return self.nbytes / self.versions / 1e6 if self.versions else 0.0

    @property
    def ms(self) -> float:
        """Milliseconds of one version in the mean; 0 before the first."""
        return 1e3 * self.seconds / self.versions if self.versions else 0.0


class Traffic:
    """Counts by kind: a way, `PUBLISHED`, `SHARDS` or `APPLY`."""

    def __init__(self) -> None:
        self.moved: dict[str, Moved] = {}

    def add(self, kind: str, nbytes: int, seconds: float, sources: Mapping[str, int] = {}) -> None:
        moved = self.moved.setdefault(kind, Moved())
        moved.versions += 1
        moved.nbytes += nbytes
        moved.seconds += seconds
        for host, count in sources.items():
            moved.sources[host] = moved.sources.get(host, 0) + count

    @contextmanager
    def timed(self, kind: str, nbytes: int) -> Iterator[None]:
        """Count one version, moved within this context, unless that fails."""
        begin = time.perf_counter()
        yield
        self.add(kind, nbytes, time.perf_counter() - begin)

    def statistics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for kind, moved in self.moved.items():
            counts = (("versions", moved.versions), ("bytes", moved.nbytes), ("s", moved.seconds))
            found |= {f"{_PREFIX}/{kind}/{name}": float(count) for name, count in counts}
            found |= {f"{_PREFIX}/{kind}/from/{host}": float(count) for host, count in moved.sources.items()}
        return found


def read_traffic(counters: Mapping[str, float]) -> dict[str, Moved]:
    kinds = dict.fromkeys(name.split("/")[1] for name in counters if name.startswith(f"{_PREFIX}/"))
    return {
        kind: Moved(
            int(counters.get(f"{_PREFIX}/{kind}/versions", 0)),
            int(counters.get(f"{_PREFIX}/{kind}/bytes", 0)),
            counters.get(f"{_PREFIX}/{kind}/s", 0.0),
            {
                name.removeprefix(f"{_PREFIX}/{kind}/from/"): int(count)
                for name, count in counters.items()
                if name.startswith(f"{_PREFIX}/{kind}/from/")
            },
        )
        for kind in kinds
    }
