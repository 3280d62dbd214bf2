"""Draws a status block at the end of a terminal while other text scrolls above it.

Log handlers and warnings write to it as to a file: one write erases the block, prints the text and redraws the block.
An unfinished line is held back until its end, so that the block never splits it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TextIO

from polyrhythm.readable import visible

#: Escape sequences: go to the start of the line n lines above; erase everything below.
_UP, _ERASE = "\x1b[{}F", "\x1b[J"


class Terminal(io.TextIOBase):
    """A text stream that draws a status block on the terminal `stream`; thread-safe."""

    def __init__(self, stream: TextIO, columns: Callable[[], int] | None = None) -> None:
        """columns: returns the current width; by default the operating system is asked."""
        self._stream, self._columns = stream, columns
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._drawn, self._unfinished = 0, ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def width(self) -> int:
        """Usable columns: without the last one, in which some terminals wrap."""
        if self._columns is not None:
            return self._columns() - 1
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 0
        return max(20, (columns or 80) - 1)  # 0 on a pseudo-terminal without a size

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Print text above the block, whole lines at a time."""
        with self._lock:
            whole, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Replace the block; no lines: remove it."""
        with self._lock:
            self._lines = [visible(line) for line in lines]
            self._put("")

    def end(self) -> None:
        """Remove the block, and write the unfinished line."""
        with self._lock:
            rest, self._unfinished, self._lines = self._unfinished, "", []
            self._put(rest)

    def _put(self, text: str) -> None:
        erase = _UP.format(self._drawn) + _ERASE if self._drawn else ""
        self._drawn = len(self._lines)
        if output := erase + text + "".join(line + "\n" for line in self._lines):
            with suppress(OSError):  # the terminal was closed; the run still saves its state
                self._stream.write(output)
                self._stream.flush()
