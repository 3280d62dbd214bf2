"""A terminal with a block of lines at its end that is drawn anew while other text passes above it.

Whoever writes to it (log handlers, warnings) writes as to a file: the block goes, the text comes, the block comes
back, in one write. An unfinished line waits for its end, so that the block never stands in the middle of it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

#: To the begin of a line some lines above, and away with all below.
_UP, _ERASE = "\x1b[{}F", "\x1b[J"


class Terminal(io.TextIOBase):
    """Writes to `stream`, which is a terminal; safe for threads."""

    def __init__(self, stream: TextIO, columns: Callable[[], int] | None = None) -> None:
        """columns: how wide it is at the moment; asks the system unless given."""
        self._stream, self._columns = stream, columns
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._drawn, self._unfinished = 0, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def width(self) -> int:
        """Columns that can be used: in the last one some terminals would begin another line."""
        if self._columns is not None:
            return self._columns() - 1
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 0
        return max(20, (columns or 80) - 1)  # some say 0, as a pseudo-terminal that nobody has sized

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Text above the block, whole lines at a time."""
        with self._lock:
            whole, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Put this block in place of the one before; no lines: none."""
        with self._lock:
            self._lines = list(lines)
            self._put("")

    def end(self) -> None:
        """Take the block away, and write what was unfinished."""
        with self._lock:
            rest, self._unfinished, self._lines = self._unfinished, "", []
            self._put(rest)

    def _put(self, text: str) -> None:
        away = _UP.format(self._drawn) + _ERASE if self._drawn else ""
        self._drawn = len(self._lines)
        if all_of_it := away + text + "".join(line + "\n" for line in self._lines):
            with suppress(OSError):  # it has been closed: nobody reads any more, and the run saves itself
                self._stream.write(all_of_it)
                self._stream.flush()
