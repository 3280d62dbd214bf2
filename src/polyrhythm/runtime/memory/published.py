"""The memory of published weights as bytes: a header, then two equal buffers. No tensor library is needed.

    header   version + 1 in each buffer (0: empty), then the number of its publication
    buffer   one version, as a `WeightsLayout` places its tensors

A buffer is written under an exclusive lock of its file and read under a shared one (flock). A process that dies
releases its lock.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import BinaryIO

import numpy as np

from polyrhythm.specs.weights import WeightsLayout

_HEADER = 64
EMPTY = -1


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

    def lock(self, index: int, operation: int) -> BinaryIO:
        """Lock a buffer, see `lock_file`."""
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


def shared_nbytes(layout: WeightsLayout) -> int:
    """Memory that both buffers need."""
    return _HEADER + 2 * layout.nbytes
