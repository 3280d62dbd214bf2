"""A file that a run appends to while it goes on, and whose loss must not end it.

Invariant: the file holds whole pieces of text only. A piece that could not be written whole is cut off again.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from polyrhythm.files import trouble

log = logging.getLogger(__name__)

#: Bytes that are kept until they are written at once.
_BUFFER = 64 * 1024


class LogFile:
    """Appends text to `path`. `failed`: the log has said that something could not be written; it says so once.

    buffered: several pieces go to the disk at once, when there are enough of them or at `flush`. OSError: the file
    cannot be opened; nothing later raises one.
    """

    def __init__(self, path: Path, *, anew: bool = False, buffered: bool = False) -> None:
        """anew: begin with an empty file."""
        self.failed = False
        self._path, self._most = path, _BUFFER if buffered else 0
        self._file = path.open("wb" if anew else "ab", buffering=0)
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, text: str) -> None:
        """Append this text, whole or not at all."""
        piece = text.encode()
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._most:
            self.flush()

    def flush(self) -> None:
        """Write what is kept. If that is impossible it is lost."""
        rest, self._pieces, self._size = memoryview(b"".join(self._pieces)), [], 0
        end = os.fstat(self._file.fileno()).st_size
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            warn_of_loss(self._path, error, again=self.failed)
            self.failed = True
            if os.fstat(self._file.fileno()).st_size > end:
                os.ftruncate(self._file.fileno(), end)
                self._file.seek(end)

    def close(self) -> None:
        """Write what is kept and close the file; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()


def warn_of_loss(path: Path, error: OSError, *, again: bool = False) -> None:
    """Say, unless it was said before, that a run goes on without something that it would write for its reader."""
    if not again:
        error.filename = error.filename or str(path)
        said = trouble(error) or f"{error.filename} could not be written ({error.strerror})"
        log.warning("%s; the run goes on, and what cannot be written there is lost", said)
