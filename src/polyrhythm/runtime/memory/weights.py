"""The weights bus: versioned and double-buffered, in plain or in shared memory.

    header   version of buffer 0, version of buffer 1; -1 while a buffer is empty or being written
    buffers  two of equal size, every tensor at the same place

Publishing overwrites the older buffer. A reader copies and looks at the header again: what was overwritten meanwhile it
copies once more, from the newest. One writer at a time.

Invariants: of the two newest versions published at least the newest can be read whole at any time, also when the writer
died in the middle; versions only rise.
"""

from __future__ import annotations

import numpy as np

from polyrhythm.runtime.memory.tensors import Module, State, apply_state, nbytes_of, snapshot, tensors_over

_HEADER = 64


def bus_nbytes(state: State) -> int:
    """Memory that a bus for such weights needs."""
    return _HEADER + 2 * nbytes_of(state)


class WeightsBus:
    """A bus in `memory` (`bus_nbytes` bytes, zero when new) for weights like `like`: names, shapes, dtypes."""

    def __init__(self, like: State, memory: memoryview | bytearray) -> None:
        view = memoryview(memory)
        # Versions are stored plus one, so that zeroed memory is an empty bus.
        self._stored = np.frombuffer(view, np.int64, 2)
        size = nbytes_of(like)
        self._buffers = [tensors_over(like, view[_HEADER + i * size : _HEADER + (i + 1) * size]) for i in range(2)]

    def versions(self) -> tuple[int, int]:
        """What the two buffers hold, -1 for nothing."""
        return int(self._stored[0]) - 1, int(self._stored[1]) - 1

    @property
    def nbytes(self) -> int:
        """Size of one version."""
        return nbytes_of(self._buffers[0])

    @property
    def newest(self) -> int:
        """Highest version published, -1 before the first."""
        return max(self.versions())

    def publish(self, version: int, state: State) -> None:
        """Make `state` readable as `version`. ValueError: it does not fit the bus.

        A version that is there already was put there by a writer who died before anybody heard of it: it is replaced.
        """
        held = self.versions()
        buffer = held.index(max(held)) if max(held) >= version else held.index(min(held))
        self._stored[buffer] = 0
        snapshot(state, self._buffers[buffer])
        self._stored[buffer] = version + 1

    def apply(self, version: int, module: Module, present: int = -1) -> int:
        """Overwrite the module's weights with `version`, or with the newest where that has been overwritten.

        The version applied; `present` is the one that the module has, which is not copied again.
        ValueError: the weights do not fit; then nothing has been changed.
        """
        while True:
            held = self.versions()
            found = version if version in held else max(held)
            assert found >= 0, "nothing was published"
            if found == present:
                return found
            buffer = held.index(found)
            apply_state(module, self._buffers[buffer])
            if self.versions()[buffer] == found:
                return found

    def read(self, version: int | None = None) -> tuple[int, State]:
        """A copy of the weights of `version`, or of the newest where that has been overwritten; and which it is."""
        while True:
            found = version if version is not None and version in self.versions() else self.newest
            assert found >= 0, "nothing was published"
            buffer = self.versions().index(found)
            copy = {name: tensor.clone() for name, tensor in self._buffers[buffer].items()}
            if self.versions()[buffer] == found:
                return found, copy


def bus_in_memory(like: State) -> WeightsBus:
    """A bus in this process's own memory."""
    return WeightsBus(like, bytearray(bus_nbytes(like)))
