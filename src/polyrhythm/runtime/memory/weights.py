"""How published weights get from the trainer to the modules that use them: one contract, an implementation per place.

    publish   `Weights.publish`: make a copy readable as a version, converted to the dtypes of the layout
    stage     `Receiver.stage`: copy a version to where it will be used, while the module goes on serving
    apply     `Receiver.apply`: overwrite the module's tensors in place, between two passes

`InlineWeights` hands versions over by reference within a process, `SharedWeights` through shared memory on one host.
Every implementation passes tests/conformance/test_weights.py.

Invariants: versions only rise; the newest complete version can be read at any time, also when the writer died in the
middle of another; what is read is one version, whole; all processes use one `WeightsLayout`. The writer's tensors do
not change while they are copied: the trainer's next optimizer step waits (`before_step` in stations/trainer.py).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from polyrhythm.runtime.memory.tensors import State, copy_into, tensors_over, to_dtype
from polyrhythm.specs.weights import WeightsLayout, first_misfit, weight_specs

_HEADER = 64
_EMPTY = -1


class Weights(Protocol):
    """One process's end of a run's weights channel. There is one writer at a time."""

    layout: WeightsLayout

    @property
    def newest(self) -> int:
        """Highest version published, -1 before the first."""
        ...

    def publish(self, version: int, state: State) -> None:
        """Make a copy of the layout's tensors in `state` readable as `version`; other tensors are ignored.

        A version that is there already was left by a writer that died before announcing it: it is replaced.
        ValueError: a tensor is missing or does not fit; then nothing has changed.
        """
        ...

    def fetch(self, version: int, into: State, present: int = _EMPTY) -> int:
        """Copy `version`, or the newest if that is gone, into the layout's tensors of `into`; which it is.

        present: the version that `into` holds; nothing is copied where it is this one.
        """
        ...

    def read(self, version: int | None = None) -> tuple[int, State]:
        """Tensors of `version`, or of the newest if that is gone, that no publication changes; and which it is."""
        ...


class InlineWeights:
    """Within one process: a publication copies once, readers get references. Copies stay on the trainer's device."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self._held: dict[int, State] = {}

    @property
    def newest(self) -> int:
        return max(self._held, default=_EMPTY)

    def publish(self, version: int, state: State) -> None:
        check_fit(self.layout, state, convertible=True)
        copies = {name: to_dtype(state[name], spec.dtype) for name, spec in self.layout.published.items()}
        older = {held: tensors for held, tensors in self._held.items() if held < version}
        kept = sorted(older)[-1:]
        self._held = {**{held: older[held] for held in kept}, version: copies}

    def fetch(self, version: int, into: State, present: int = _EMPTY) -> int:
        found, tensors = self.read(version)
        if found != present:
            copy_into(into, tensors)
        return found

    def read(self, version: int | None = None) -> tuple[int, State]:
        held = self._held
        assert held, "nothing was published"
        found = version if version is not None and version in held else max(held)
        return found, dict(held[found])


class SharedWeights:
    """In memory that processes of one host share: a header with the version in each buffer, then two equal buffers.

    memory: `shared_nbytes(layout)` bytes, zero when new; folder: where the buffers' lock files are.

    A buffer is written under an exclusive lock of its file and read under a shared one (flock). The kernel's lock is
    what orders memory between processors: all stores of a publication come before its unlock, all loads of a reader
    after its lock, whatever order a processor (ARM) gives to stores and loads in between. A process that dies releases
    its lock, and its own stores are visible in program order: the header says "empty" before the first tensor is
    overwritten. `newest` reads the header without the lock, as a hint: whoever asks for a version was told of it by a
    message, which was sent after the unlock.
    """

    def __init__(self, layout: WeightsLayout, memory: memoryview | bytearray, folder: Path) -> None:
        self.layout = layout
        view = memoryview(memory)
        # Versions are stored plus one, so that zeroed memory is empty.
        self._stored = np.frombuffer(view, np.int64, 2)
        size = layout.nbytes
        self._buffers = [tensors_over(layout, view[_HEADER + i * size : _HEADER + (i + 1) * size]) for i in range(2)]
        self._files = [folder / f"weights.{index}.lock" for index in range(2)]

    def versions(self) -> tuple[int, int]:
        """What the two buffers hold, -1 for nothing."""
        return int(self._stored[0]) - 1, int(self._stored[1]) - 1

    @property
    def newest(self) -> int:
        return max(self.versions())

    def publish(self, version: int, state: State) -> None:
        """As in `Weights`. Overwrites the older buffer; waits for a reader that is in the middle of it."""
        check_fit(self.layout, state, convertible=True)
        held = self.versions()
        index = held.index(max(held)) if max(held) >= version else held.index(min(held))
        with self._locked(index, exclusive=True):
            self._stored[index] = 0
            copy_into(self._buffers[index], state)
            self._stored[index] = version + 1

    def fetch(self, version: int, into: State, present: int = _EMPTY) -> int:
        with self._reading(version) as (found, tensors):
            if found != present:
                copy_into(into, tensors)
        return found

    def read(self, version: int | None = None) -> tuple[int, State]:
        with self._reading(_EMPTY if version is None else version) as (found, tensors):
            return found, {name: tensor.clone() for name, tensor in tensors.items()}

    @contextmanager
    def _reading(self, version: int) -> Iterator[tuple[int, State]]:
        """`version`, or the newest if that is gone, and its tensors, which nobody overwrites meanwhile."""
        while True:
            held = self.versions()
            found = version if version in held and version >= 0 else max(held)
            assert found >= 0, "nothing was published"
            index = held.index(found)
            with self._locked(index, exclusive=False):
                if self.versions()[index] == found:
                    yield found, self._buffers[index]
                    return

    @contextmanager
    def _locked(self, index: int, *, exclusive: bool) -> Iterator[None]:
        """Hold the lock of a buffer. Each use opens the file anew, so threads of a process exclude each other too."""
        file = os.open(self._files[index], os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield
        finally:
            os.close(file)


def shared_nbytes(layout: WeightsLayout) -> int:
    """Memory that `SharedWeights` needs."""
    return _HEADER + 2 * layout.nbytes


def check_fit(layout: WeightsLayout, state: State, *, convertible: bool) -> None:
    """Raise ValueError unless `state` has all tensors of the layout. convertible: in any floating-point dtype."""
    found = weight_specs({name: tensor for name, tensor in state.items() if name in layout.published})
    if name := first_misfit(layout.published, found, convertible=convertible):
        raise ValueError(
            f"weights do not fit the policy: {name} is {found.get(name, 'missing')}, "
            f"the layout has {layout.published[name]}"
        )
