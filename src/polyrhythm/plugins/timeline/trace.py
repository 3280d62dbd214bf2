"""Writes a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing, from times that the caller gives.

Times may be real or simulated: seconds in, microseconds in the file. Processes and threads are given by name and
numbered in order of appearance. The file is a JSON array with one event per line, so viewers can open the file of a
killed run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polyrhythm.observe.log_file import LogFile

_encode = json.JSONEncoder(separators=(",", ":")).encode


class TraceWriter:
    """Writer of a trace file; `close` ends the array. Events may come in any order.

    A write error, as on a full disk, ends the timeline with one warning.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = LogFile(path, anew=True, buffered=True)
        self._file.write("[")
        self._file.flush()
        self._first = True
        self._processes: dict[str, int] = {}
        self._threads: dict[tuple[str, str], int] = {}

    def complete(
        self, process: str, thread: str, name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Write a bar from start_s to end_s on a thread's line; viewers show `args` on a click."""
        assert end_s >= start_s, f"{name} ends at {end_s} before it starts at {start_s}"
        pid, tid = self._ids(process, thread)
        # Rounding the end instead of the length keeps adjacent bars from overlapping.
        start_us, end_us = _micros(start_s), _micros(end_s)
        event = {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_us, "dur": round(end_us - start_us, 3)}
        self._write(event | ({"args": dict(args)} if args else {}))

    def instant(
        self, process: str, thread: str, name: str, time_s: float, args: Mapping[str, Any] | None = None
    ) -> None:
        """Write a mark on a thread's line."""
        pid, tid = self._ids(process, thread)
        event = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": _micros(time_s)}
        self._write(event | ({"args": dict(args)} if args else {}))

    def counter(self, process: str, name: str, time_s: float, values: Mapping[str, float]) -> None:
        """Write a point of a stacked curve of one or more numbers, such as queue lengths."""
        pid = self._process(process)
        self._write({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": _micros(time_s), "args": dict(values)})

    def close(self) -> None:
        """End the array; a second call does nothing."""
        if not self._file.closed:
            self._file.flush()
            self._file.write("\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, process: str, thread: str) -> tuple[int, int]:
        pid = self._process(process)
        tid = self._threads.get((process, thread))
        if tid is None:
            tid = self._threads[process, thread] = len(self._threads) + 1
            self._name("thread", pid, tid, thread)
        return pid, tid

    def _process(self, process: str) -> int:
        pid = self._processes.get(process)
        if pid is None:
            pid = self._processes[process] = len(self._processes) + 1
            self._name("process", pid, 0, process)
        return pid

    def _name(self, kind: str, pid: int, tid: int, name: str) -> None:
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_name", "args": {"name": name}})
        order = {"sort_index": tid or pid}
        self._write({"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_sort_index", "args": order})

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._file.failed:
            return
        self._file.write(("\n" if self._first else ",\n") + _encode(event))
        self._first = False


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
