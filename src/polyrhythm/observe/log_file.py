"""Appends text, or records, to a file of a running run; a write error is logged and does not end the run.

Invariant: the file holds whole pieces of text only; a partly written piece is truncated away.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from polyrhythm.files import trouble

log = logging.getLogger(__name__)

#: Bytes that a buffered file collects before a write.
_BUFFER = 64 * 1024


class LogFile:
    """An append-only text file. `failed`: a write has failed, which is logged once.

    buffered: collect pieces and write them together, at a size or at `flush`. OSError: the file cannot be opened; later
    calls raise none.
    """

    def __init__(self, path: Path, *, anew: bool = False, buffered: bool = False) -> None:
        """anew: truncate the file first."""
        self.failed = False
        self._path, self._most = path, _BUFFER if buffered else 0
        self._file = path.open("wb" if anew else "ab", buffering=0)
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, text: str | bytes) -> None:
        """Append the text, whole or not at all."""
        piece = text.encode() if isinstance(text, str) else text
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > self._most:
            self.flush()

    def flush(self) -> None:
        """Write the buffered text; on a write error it is lost."""
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
        """Flush and close the file; a second call does nothing."""
        if not self._file.closed:
            self.flush()
            self._file.close()


def warn_of_loss(path: Path, error: OSError, *, again: bool = False) -> None:
    """Log that the run continues although `path` cannot be written. again: it was logged before, so it is not
    repeated."""
    if not again:
        error.filename = error.filename or str(path)
        problem = trouble(error) or f"{error.filename} could not be written ({error.strerror})"
        log.warning("%s; the run goes on, and what cannot be written there is lost", problem)
