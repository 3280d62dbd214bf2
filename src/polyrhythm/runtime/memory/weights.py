"""How published weights get from the trainer to the modules that use them: one contract, an implementation per place.

    publish   `Weights.publish`: make a copy readable as a version, converted to the dtypes of the layout
    stage     `Receiver.stage`: copy a version to where it will be used, while the module goes on serving
    apply     `Receiver.apply`: overwrite the module's tensors in place, between two passes

`InlineWeights` hands versions over by reference within a process, `SharedWeights` through shared memory on one host,
`DeviceWeights` (`device_weights`) also on a device that trainer and generator share.
Every implementation passes tests/conformance/test_weights.py.

Invariants: versions only rise; the newest complete version can be read at any time, also when the writer died in the
middle of another; what is read is one version, whole; all processes use one `WeightsLayout`. The writer's tensors do
not change while they are copied: the trainer's next optimizer step waits (`before_step` in stations/trainer.py).

A writer that dies before it has announced a version leaves it readable, and its successor may publish the same version
with other content. Therefore publications are numbered: a copy of the first is not taken for the second.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from polyrhythm.runtime.memory.published import EMPTY, PUBLISHED, SHARDS, PublishedMemory, Traffic, Way
from polyrhythm.runtime.memory.tensors import (
    Copy,
    Device,
    RowsOf,
    State,
    Stream,
    copy_into,
    copy_tensor,
    fitting,
    tensors_over,
    to_dtype,
)
from polyrhythm.specs.weights import WeightsLayout


class Publication(NamedTuple):
    """One publication of a version. number: counts the publications of a channel, from 1."""

    version: int
    number: int


#: Each of the numbers summed over several processes.
Totals = Callable[[Sequence[float]], Sequence[float]]
#: What a module holds that has received nothing.
NOTHING = Publication(EMPTY, 0)


class Fetched(NamedTuple):
    """What is there after a fetch. way: how it came; None if it was there before; sources: bytes by the host that sent
    them, if it came over hosts."""

    publication: Publication
    way: Way | None
    sources: Mapping[str, int] = {}


class Weights(Protocol):
    """One process's end of a run's weights channel. There is one writer at a time. traffic: what it has published.
    shared: the memory in which several processes of this host can publish together; None if there is none."""

    layout: WeightsLayout
    traffic: Traffic

    @property
    def shared(self) -> SharedWeights | None: ...

    @property
    def fetches(self) -> bool:
        """Whether what is read may come from another host, which takes as long as the link needs."""

    @property
    def newest(self) -> int:
        """Highest version published, -1 before the first."""

    def publish(self, version: int, state: State | Stream) -> None:
        """Make a copy of the layout's tensors in `state` readable as `version`; other tensors are ignored.

        A stream, in any order, is copied tensor by tensor and never held whole. A version that is there already was
        left by a writer that died before announcing it: it is replaced. ValueError: a tensor is missing, given twice,
        or does not fit; then nothing has changed. Of a stream the first tensor alone is known that early: if it breaks
        later, for this or its own reason, the newest version is what it was, and the one before that may be gone.
        """

    def find(self, version: int) -> Publication | None:
        """The publication of `version` that can be read now; None if that is gone."""

    def lies_on(self, device: Device) -> bool:
        """Whether a module on this device can take a version without bringing it there first."""

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        """Copy `version`, or the newest if that is gone, into the layout's tensors of `into`; which it is, and how it
        came.

        present: what `into` holds; nothing is copied where it is this one. copy: how; no publication changes what it
        reads before it returns.
        """

    def read(self, version: int | None = None) -> tuple[int, State]:
        """Tensors of `version`, or of the newest if that is gone, that no publication changes; and which it is."""


class InlineWeights:
    """Within one process: a publication copies once, readers get references. Copies stay on the trainer's device, or,
    with host, in host memory: where stations are on their devices in turn, no version may stay there."""

    fetches, shared = False, None

    def __init__(self, layout: WeightsLayout, *, host: bool = False) -> None:
        self.layout, self.traffic, self._host = layout, Traffic(), host
        self._held: dict[int, State] = {}
        self._numbers: dict[int, int] = {}

    @property
    def newest(self) -> int:
        return max(self._held, default=EMPTY)

    def publish(self, version: int, state: State | Stream) -> None:
        specs = self.layout.published
        with self.traffic.timed(PUBLISHED, self.layout.nbytes):
            copies = {}
            for name, tensor in fitting(self.layout, state):
                copies[name] = to_dtype(tensor, specs[name].dtype, host=self._host)
                del tensor  # before the next is made
        older = {held: tensors for held, tensors in self._held.items() if held < version}
        kept = sorted(older)[-1:]
        self._held = {**{held: older[held] for held in kept}, version: copies}
        number = max(self._numbers.values(), default=0) + 1
        self._numbers = {**{held: self._numbers[held] for held in kept}, version: number}

    def find(self, version: int) -> Publication | None:
        return Publication(version, self._numbers[version]) if version in self._held else None

    def lies_on(self, device: Device) -> bool:
        """Without `host`, what is published stays on the trainer's device, not known before the first publication."""
        held = next(iter(self._held.values()), {})
        return device.type == "cpu" or any(tensor.device == device for tensor in islice(held.values(), 1))

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        version, tensors = self.read(version)
        found = Publication(version, self._numbers[version])
        if found == present:
            return Fetched(found, None)
        copy(into, tensors)
        return Fetched(found, "reference")

    def read(self, version: int | None = None) -> tuple[int, State]:
        held = self._held
        assert held, "nothing was published"
        found = version if version is not None and version in held else max(held)
        return found, dict(held[found])


class SharedWeights:
    """In memory that processes of one host share: a header with the version and the number of the publication in each
    buffer, then two equal buffers.

    memory: `shared_nbytes(layout)` bytes, zero when new; folder: where the buffers' lock files are.

    A buffer is written under an exclusive lock of its file and read under a shared one (flock). The kernel's lock is
    what orders memory between processors: all stores of a publication come before its unlock, all loads of a reader
    after its lock, whatever order a processor (ARM) gives to stores and loads in between. A process that dies releases
    its lock, and its own stores are visible in program order: the header says "empty" before the first tensor is
    overwritten. `newest` reads the header without the lock, as a hint: whoever asks for a version was told of it by a
    message, which was sent after the unlock.

    A reader waits for a writer only if the other buffer cannot serve: one that is stopped while it holds a lock does
    not stop main, which also reads, and which ends processes that are stopped.

    Several processes of the host may write a version together (`publish_pieces`): one holds the lock and marks the
    version, the others write while it waits for them. They agree by messages, which order memory as the lock does. If
    one dies, the version is never marked; the others fail too, and write nothing more before their successors start.
    """

    fetches = False

    def __init__(self, layout: WeightsLayout, memory: memoryview | bytearray, folder: Path) -> None:
        self.layout, self.traffic = layout, Traffic()
        self._memory = PublishedMemory(layout, memory, folder)
        self._numbers = self._memory.numbers
        self._buffers = [tensors_over(layout, buffer) for buffer in self._memory.buffers]
        self.versions, self.held = self._memory.versions, self._memory.held

    @property
    def shared(self) -> SharedWeights:
        return self

    @property
    def newest(self) -> int:
        return max(self.versions())

    def publish(self, version: int, state: State | Stream) -> None:
        """As in `Weights`. Overwrites the older buffer; waits for a reader that is in the middle of it."""
        tensors = fitting(self.layout, state)
        with self._writing(version) as index:
            into = self._buffers[index]
            for name, tensor in tensors:
                copy_tensor(into[name], tensor)
                del tensor  # before the next is made

    def publish_pieces(self, version: int, pieces: Iterable[RowsOf], totals: Totals, *, leads: bool) -> None:
        """As `publish`, by several processes of this host at once. pieces: of this one, in any floating-point dtype;
        those of all are the layout's tensors, each row once. totals: sums numbers over these processes, which all wait
        for it; raises an error if one has ended. leads: true for one of them, which marks the version."""
        if leads:
            with self._writing(version, SHARDS) as index:
                self._write_pieces(index, pieces, totals)
        else:
            self._write_pieces(0, pieces, totals)

    def _write_pieces(self, index: int, pieces: Iterable[RowsOf], totals: Totals) -> None:
        """index: of the buffer, if this process leads, else 0."""
        into = self._buffers[int(totals([index])[0])]
        for name, rows, first in pieces:
            whole = into[name]
            copy_tensor(whole if first is None else whole.narrow(0, first, len(rows)), rows)
        totals([0])  # all have written

    @contextmanager
    def _writing(self, version: int, kind: str = PUBLISHED) -> Iterator[int]:
        """See `PublishedMemory.writing`."""
        with self._memory.writing(version, self.lock) as index, self.traffic.timed(kind, self.layout.nbytes):
            yield index

    def find(self, version: int) -> Publication | None:
        held = self.versions()
        return Publication(version, int(self._numbers[held.index(version)])) if version in held else None

    def lies_on(self, device: Device) -> bool:
        """Shared memory is the host's."""
        return device.type == "cpu"

    def fetch(self, version: int, into: State, present: Publication = NOTHING, copy: Copy = copy_into) -> Fetched:
        with self._reading(version) as (found, tensors):
            if found == present:
                return Fetched(found, None)
            copy(into, tensors)
        return Fetched(found, "host")

    def read(self, version: int | None = None) -> tuple[int, State]:
        with self._reading(EMPTY if version is None else version) as (found, tensors):
            return found.version, {name: tensor.clone() for name, tensor in tensors.items()}

    @contextmanager
    def _reading(self, version: int) -> Iterator[tuple[Publication, State]]:
        """`version`, or the newest if that is gone, and its tensors, which nobody overwrites meanwhile."""
        while True:
            held = self.versions()
            assert max(held) >= 0, "nothing was published"
            index = held.index(version if version in held and version >= 0 else max(held))
            try:
                serves = held[1 - index] >= max(version, 0)
                file = self.lock(index, fcntl.LOCK_SH | (fcntl.LOCK_NB if serves else 0))
            except BlockingIOError:  # it is being overwritten, so it counts as gone
                index = 1 - index
                file = self.lock(index, fcntl.LOCK_SH)
            with file:
                if self.versions()[index] == held[index]:
                    yield Publication(held[index], int(self._numbers[index])), self._buffers[index]
                    return

    def lock(self, index: int, operation: int) -> BinaryIO:
        """Lock a buffer, see `lock_file`."""
        return self._memory.lock(index, operation)
