"""Live status block of a running command, and the terminal that draws it below scrolling text.

The lines of the block are a pure function of the status. Log handlers and warnings write to the terminal as to a file:
one write erases the block, prints the text and redraws the block. An unfinished line is held back until its end, so
that the block never splits it.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from polyrhythm.observe.activity import by_kind
from polyrhythm.observe.intervals import episodes_in_words
from polyrhythm.readable import visible

#: More stations than this are displayed by kind, with the mean of their shares.
_STATIONS = 6
#: More hosts than this are displayed by kind.
_HOSTS = 6
_BAR = 10
#: Replacements for terminals that show ASCII only.
_PLAIN = str.maketrans({"─": "-", "█": "#", "░": ".", "·": "|", "×": "x", "…": "~"})


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run at one moment. None or empty: not known yet.

    done, of: units of the phase (updates, or episodes of an evaluation); left_s: estimated time to the end of the run,
    or of `left_of`; recent: success (None if not reported) and return of the last training episodes; lag: mean of the
    last update, maximum of all; buffer: finished samples that wait for the trainer; utilisation: share of the last
    seconds, by station; hosts: if there are several, the mean share of each one's stations (None without stations) and
    its number of lost stations; notes: sentences of plugins, such as advice.
    """

    phase: str
    elapsed_s: float
    done: int = 0
    of: int = 0
    unit: str = ""
    left_s: float | None = None
    left_of: str = ""
    recent: Sequence[tuple[bool | None, float]] = ()
    transitions_per_s: float | None = None
    lag: tuple[float, int] | None = None
    buffer: int | None = None
    faults: int = 0
    utilisation: Mapping[str, float] = field(default_factory=dict)
    hosts: Mapping[str, tuple[float | None, int]] = field(default_factory=dict)
    notes: Sequence[str] = ()


def block(status: Status, width: int, *, plain: bool = False) -> list[str]:
    """Lines of the block, none longer than `width`. plain: ASCII only."""
    heading = [status.phase]
    if status.of:
        heading.append(f"{status.unit} {status.done} of {status.of}")
    heading.append(f"{duration(status.elapsed_s)} so far")
    if status.left_s is not None:
        heading.append(f"about {duration(status.left_s)} left{' of ' if status.left_of else ''}{status.left_of}")
    lines = [f"── {' · '.join(heading)} ".ljust(width, "─"), *_wrapped(_metrics(status), " · ", width)]
    lines += _wrapped(_stations(status.utilisation), "   ", width) + _wrapped(_hosts(status.hosts), "   ", width)
    for note in status.notes:
        lines += _wrapped(note.split(" "), " ", width)
    cut = [line if len(line) <= width else line[: width - 1] + "…" for line in lines]
    return [line.translate(_PLAIN) for line in cut] if plain else cut


def _metrics(status: Status) -> list[str]:
    parts = []
    if status.recent:
        parts.append(episodes_in_words(status.recent))
    if status.transitions_per_s is not None:
        parts.append(f"{status.transitions_per_s:,.0f} transitions/s")
    if status.lag is not None:
        parts.append(f"lag {status.lag[0]:.1f} (largest {status.lag[1]})")
    if status.buffer is not None:
        parts.append(f"buffer {_counted(status.buffer, 'sample')}")
    if parts or status.faults:
        parts.append(_counted(status.faults, "fault"))
    return parts


def _stations(utilisation: Mapping[str, float]) -> list[str]:
    shares = by_kind(utilisation, _STATIONS)
    return [f"{name} {bar(share)} {100 * share:3.0f}%" for name, share in shares.items()]


def _hosts(hosts: Mapping[str, tuple[float | None, int]]) -> list[str]:
    """Each host with its faults. Many hosts are merged, except main, and those with faults are named."""
    shares = by_kind({host: share for host, (share, _) in hosts.items() if share is not None}, _HOSTS)
    told = [f"{name} {bar(share)} {100 * share:3.0f}%{_faults(name, shares, hosts)}" for name, share in shares.items()]
    return told + [
        f"{host} has no station{_faults(host, shares, hosts)}" for host, (share, _) in hosts.items() if share is None
    ]


def _faults(name: str, shares: Mapping[str, float], hosts: Mapping[str, tuple[float | None, int]]) -> str:
    """Faults of one host, or of all hosts merged under this name."""
    if name in hosts:
        return f", {_counted(hosts[name][1], 'fault')}"
    own = {
        host: faults for host, (share, faults) in hosts.items() if faults and share is not None and host not in shares
    }
    where = f" ({', '.join(own)})" if own else ""
    return f", {_counted(sum(own.values()), 'fault')}{where}"


def bar(share: float, length: int = _BAR) -> str:
    filled = round(max(0.0, min(1.0, share)) * length)
    return "█" * filled + "░" * (length - filled)


def duration(seconds: float) -> str:
    """The time as `0:07`, `12:30` or `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _counted(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _wrapped(parts: Sequence[str], between: str, width: int) -> list[str]:
    """Join the parts into as few lines of `width` as possible; a part is never split."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


#: Escape sequences: go to the start of the line n lines above; erase everything below.
_UP, _ERASE = "\x1b[{}F", "\x1b[J"


class Terminal(io.TextIOBase):
    """A text stream that draws a status block on the terminal `stream`; thread-safe."""

    def __init__(self, stream: TextIO, columns: Callable[[], int] | None = None) -> None:
        """columns: returns the current width; None: query the operating system."""
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
        """Remove the block and write the unfinished line."""
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
