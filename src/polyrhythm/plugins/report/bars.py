"""Draws the two figures with time bars: the stations' timeline, a few seconds in the middle of the run's trace, and
the wall time of each phase."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.plugins.report import svg
from polyrhythm.plugins.report.figures import Figure, area_key, colour
from polyrhythm.plugins.report.read import Run

#: Updates in the window, most bars in it, and its length if there are no updates.
_UPDATES, _MOST, _SECONDS = 3, 6000, 2.0
_WIDTH, _LEFT, _RIGHT = 920, 145, 12
#: Most lanes of one kind; height of a lane and of the gap below it.
_LANES, _LANE, _GAP = 12, 18, 5

#: Kind of a bar → CSS class, height, legend. Waiting is drawn thin.
_THIN = 6
_KINDS = {
    "stepping": ("s2", _LANE, "slot: its simulator steps it"),
    "resetting": ("s4", _LANE, "slot: its simulator resets it"),
    "in_batch": ("s0", _THIN, "slot: its request is in a forward pass"),
    "generator": ("faint", _THIN, "slot: waits for a generator"),
    "thread": ("s6", _THIN, "slot: waits for its simulator"),
    "tickets": ("s5", _THIN, "slot: has no ticket"),
    "forward": ("s0", _LANE, "generator: forward pass"),
    "apply": ("s3", _LANE, "generator: takes new weights"),
    "score": ("s4", _LANE, "scorer: the reward function"),
    "update": ("s1", _LANE, "trainer: optimizer steps"),
    "publish": ("s3", _LANE, "trainer: publishes weights"),
    "save": ("s6", _LANE, "trainer: saves its state"),
}


class Bar(NamedTuple):
    """An event of a lane, in seconds of the trace. name: as in the trace."""

    lane: tuple[str, str]
    name: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The bar's kind: update for `update 17`, forward for `4 requests`, stepping for `stepping`."""
        return "forward" if self.name.endswith("requests") else self.name.split(maxsplit=1)[0]


@dataclass(frozen=True)
class Window:
    """Bars between two times, and the lanes in trace order."""

    start: float
    end: float
    lanes: list[tuple[str, str]]
    bars: list[Bar]


def timeline_window(folder: Path) -> Window | None:
    """The window of the run in `folder`; None without a trace that has bars. Uses the largest trace of a resumed
    run."""
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
    """Start of an update in the middle, and end of the last update shown. An update has many bars with its name."""
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
    """The trace's events, one per line; a truncated last line is skipped."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            text = line.strip().removeprefix("[").rstrip(",")
            if text and text != "]":
                try:
                    yield json.loads(text)
                except ValueError:
                    return


def timeline(run: Run) -> Figure | None:
    """A few seconds of the trace, with a lane for each slot, each generator and the trainer; None without a trace."""
    window = timeline_window(run.folder)
    if window is None:
        return None
    slots = [lane for lane in window.lanes if lane[0] == "slots"]
    lanes = slots[:_LANES] + [lane for lane in window.lanes if lane[0] != "slots"][: 2 * _LANES]
    left_out = len(slots[_LANES:])
    parts, y = [], 4
    several = len({name.rpartition("/")[0] for kind, name in window.lanes if kind == "slots"}) > 1
    for lane in lanes:
        label = lane[1]
        if lane[0] == "slots":  # of `simulator-0.1/2`: slot 2, or slot 0.1/2 if there are several env batches
            label = f"slot {label.removeprefix('simulator-') if several else label.rpartition('/')[2]}"
        parts.append(f'<text class="end" x="{_LEFT - 8}" y="{y + 13}">{escape(label)}</text>')
        parts.append(svg.rectangle(_LEFT, y, _WIDTH - _LEFT - _RIGHT, _LANE, "lane"))
        parts += [_bar(window, kind, lane, y) for kind in _KINDS]
        y += _LANE + _GAP
    parts += _seconds(window, y)
    keys = [
        (area_key(kind), words) for name, (kind, _, words) in _KINDS.items() if any(b.kind == name for b in window.bars)
    ]
    more = f" {left_out} more slots are left out." if left_out else ""
    sentence = (
        f"{window.end - window.start:.2g} seconds of training, from second {window.start:.3g} on, as the stations "
        f"measured them. A slot is a group of environment rows that ask for actions together; a ticket is the right to "
        f"run one episode, or one segment of it. High bars are work; thin bars say what a slot waits for.{more}"
    )
    picture = svg.picture("Timeline of the stations", _WIDTH, y + 42, parts)
    return Figure("Timeline of the stations", sentence, keys, [picture])


def _x(window: Window, time_s: float) -> float:
    share = (time_s - window.start) / (window.end - window.start)
    return _LEFT + max(0.0, min(1.0, share)) * (_WIDTH - _LEFT - _RIGHT)


def _bar(window: Window, kind: str, lane: tuple[str, str], y: int) -> str:
    """All bars of a kind in a lane, as one path."""
    look, height, _ = _KINDS[kind]
    top, path = y + (_LANE - height) // 2, []
    for bar in window.bars:
        if bar.lane == lane and bar.kind == kind:
            begin, end = _x(window, bar.start), _x(window, bar.end)
            path.append(f"M{begin:.1f},{top}h{max(end - begin, 0.4):.1f}v{height}H{begin:.1f}z")
    return f'<path class="fill {look}" d="{"".join(path)}"/>' if path else ""


def _seconds(window: Window, y: int) -> list[str]:
    length = window.end - window.start
    parts = [f'<path class="axis" d="M{_LEFT},{y}H{_WIDTH - _RIGHT}"/>']
    for second in svg.ticks(0, length, 8):
        at = _x(window, window.start + second)
        parts.append(f'<path class="axis" d="M{at:.1f},{y}v5"/>')
        parts.append(f'<text class="tick middle" x="{at:.1f}" y="{y + 18}">{svg.short(second)}</text>')
    parts.append(f'<text class="name middle" x="{(_LEFT + _WIDTH) / 2:.0f}" y="{y + 36}">seconds</text>')
    return parts


def wall_time(runs: Sequence[Run]) -> Figure | None:
    """Seconds of each phase as one bar per run."""
    walls = [{k: v for k, v in run.summary.get("wall_s", {}).items() if k != "total"} for run in runs]
    phases = list(dict.fromkeys(phase for wall in walls for phase in wall))
    if not phases:
        return None
    longest = max(sum(wall.values()) for wall in walls)
    parts, y, left = [], 4, _LEFT if len(runs) > 1 else 4
    for run, wall in zip(runs, walls, strict=True):
        x = float(left)
        if len(runs) > 1:
            name = run.label.rpartition("/")[2][-17:]
            parts.append(f'<text class="end" x="{left - 8}" y="{y + 17}">{escape(name)}</text>')
        for place, phase in enumerate(phases):
            long = wall.get(phase, 0.0) / longest * (_WIDTH - left - 90) if longest else 0.0
            title = f"{phase.replace('_', ' ')}: {wall.get(phase, 0.0):.1f} s"
            parts.append(svg.rectangle(x, y, long, 24, colour(place), title))
            x += long
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 17}">{sum(wall.values()):,.0f} s</text>')
        y += 32
    keys = []
    for place, phase in enumerate(phases):
        seconds = " / ".join(f"{wall.get(phase, 0.0):,.1f} s" for wall in walls)
        words = "reinforcement learning" if phase == "rl" else phase.replace("_", " ")
        keys.append((area_key(colour(place)), f"{words}: {seconds}"))
    sentence = "Seconds of each phase, over all parts of the run if it was interrupted."
    return Figure("Wall time by phase", sentence, keys, [svg.picture("Wall time by phase", _WIDTH, y, parts)])
