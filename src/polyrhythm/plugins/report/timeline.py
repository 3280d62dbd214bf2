"""Reads a few seconds from the middle of a run's trace, for the timeline figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

#: Updates in the window, most bars in it, and its length if there are no updates.
_UPDATES, _MOST, _SECONDS = 3, 6000, 2.0


class Bar(NamedTuple):
    """An event of a lane, in seconds of the trace. name: as in the trace."""

    lane: tuple[str, str]
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The kind of `update 17` is update, of `4 requests` forward, of `stepping` stepping."""
        return "forward" if self.name.endswith("requests") else self.name.split(maxsplit=1)[0]


@dataclass(frozen=True)
class Window:
    """Bars between two times, and the lanes in the order of the trace."""

    start: float
    end: float
    lanes: list[tuple[str, str]]
    bars: list[Bar]


def timeline_window(folder: Path) -> Window | None:
    """The window of the run in `folder`; None if it has no trace with bars.

    Of the several traces of a resumed run the largest is used.
    """
    traces = sorted(
        (path for path in folder.glob("trace*.json") if path.is_file()), key=lambda path: path.stat().st_size
    )
    bars = sorted(_bars(traces[-1]), key=lambda bar: bar.start) if traces else []
    if not bars:
        return None
    start, end = _middle(bars)
    shown = [bar for bar in bars if bar.end > start and bar.start < end]
    if len(shown) > _MOST:
        end = shown[_MOST].start
        shown = shown[:_MOST]
    lanes = sorted({bar.lane for bar in bars}, key=_order)
    return Window(start, end, lanes, shown)


def _middle(bars: list[Bar]) -> tuple[float, float]:
    """Start of an update in the middle, and end of the last shown one. An update has many bars of its name."""
    spans: dict[str, tuple[float, float]] = {}
    for bar in bars:
        if bar.kind == "update":
            spans[bar.name] = (spans.get(bar.name, (bar.start, 0.0))[0], bar.end)
    updates = list(spans.values())
    if not updates:
        middle = bars[len(bars) // 2].start
        return middle, middle + _SECONDS
    first = max(0, min(len(updates) // 2, len(updates) - _UPDATES))
    shown = updates[first : first + _UPDATES]
    start, end = shown[0][0], shown[-1][1]
    margin = 0.02 * (end - start)
    return start - margin, end + margin


#: Lanes in the direction of the data flow.
_PROCESSES = ("slots", "generators", "scorers", "trainer")


def _order(lane: tuple[str, str]) -> tuple[int, str, list[int], str]:
    process, thread = lane
    known = _PROCESSES.index(process) if process in _PROCESSES else len(_PROCESSES)
    digits = "".join(c if c.isdigit() else " " for c in thread).split()
    return known, process, [int(number) for number in digits], thread


def _bars(path: Path) -> Iterator[Bar]:
    threads: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for event in _events(path):
        pid, tid = event.get("pid", 0), event.get("tid", 0)
        if event["ph"] == "M" and event["name"] == "process_name":
            processes[pid] = event["args"]["name"]
        elif event["ph"] == "M" and event["name"] == "thread_name":
            threads[pid, tid] = event["args"]["name"]
        elif event["ph"] == "X":
            start = event["ts"] / 1e6
            lane = (processes[pid], threads[pid, tid])
            yield Bar(lane, event["name"], start, start + event["dur"] / 1e6)


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The events, one a line as they are written; a truncated last line is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().removeprefix("[").rstrip(",")
            if text and text != "]":
                try:
                    yield json.loads(text)
                except ValueError:
                    return
