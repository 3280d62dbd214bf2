"""Reads a run's traces, for the timeline of the stations, for what slots wait for, and for the batches.

Times are seconds since the run began, as in metrics.jsonl: a trace's own clock begins with reinforcement learning, so
it is shifted by the median difference between the updates' ends in both files. The parts of a resumed run have a trace
each; all of them are shown.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.plugins.report.parts import BarSeries, Part, Scale, bars, chart, series, text
from polyrhythm.plugins.report.read import Run, run_marks

#: Columns of the curve of waits; most updates by which a trace is shifted.
_COLUMNS, _MATCHED = 150, 200
#: Steps of a time in a 32-bit integer; a timeline has up to 2 to the power of this blocks.
_STEPS, _BLOCK_BITS = 2**31 - 1, 6


class Kind(NamedTuple):
    """A kind of bar. waits: a slot waits, drawn thin; role: of the lanes that have it."""

    name: str
    label: str
    colour: int
    role: str
    waits: bool = False


KINDS = (
    Kind("stepping", "simulator: step", 2, "slots"),
    Kind("resetting", "simulator: reset", 4, "slots"),
    Kind("in_batch", "slot: in a forward pass", 0, "slots", waits=True),
    Kind("generator", "slot: waits for a generator", 7, "slots", waits=True),
    Kind("thread", "slot: waits for its simulator", 6, "slots", waits=True),
    Kind("tickets", "slot: no ticket", 5, "slots", waits=True),
    Kind("forward", "generator: forward pass", 0, "generators"),
    Kind("apply", "generator: takes weights", 3, "generators"),
    Kind("score", "scorer: reward function", 8, "scorers"),
    Kind("update", "trainer: optimizer steps", 1, "trainer"),
    Kind("publish", "trainer: publishes weights", 3, "trainer"),
    Kind("save", "trainer: saves its state", 9, "trainer"),
    Kind("other", "device: taken or left", 6, "devices"),
)
_PLACES = {kind.name: place for place, kind in enumerate(KINDS)}
_OTHER = _PLACES["other"]
#: End of the name of a lane of work that a station does beside its own.
_BESIDE = " publishes"
#: Roles of lanes in the direction of the data flow.
_ROLES = ("slots", "generators", "scorers", "trainer")


@dataclass(frozen=True)
class Lane:
    """One lane: its bars in order of their start, in seconds. number: requests of a pass, update, version, or slots
    that stepped together."""

    process: str
    name: str
    start: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    number: np.ndarray


class Mark(NamedTuple):
    time: float
    name: str


@dataclass(frozen=True)
class Trace:
    lanes: Sequence[Lane]
    marks: Sequence[Mark]

    @property
    def span(self) -> tuple[float, float]:
        return min(lane.start[0] for lane in self.lanes), max(lane.end.max() for lane in self.lanes)


def read_trace(run: Run) -> Trace | None:
    """All traces of the run; None without one that has bars."""
    paths = sorted(path for path in run.folder.glob("trace*.json") if path.is_file())
    key = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
    ends = tuple((line["step"], line["time_s"]) for line in run.updates if "time_s" in line)
    return _read(key, ends)


@lru_cache(maxsize=1)
def _read(key: tuple[tuple[Path, int, int], ...], ends: tuple[tuple[float, float], ...]) -> Trace | None:
    columns: dict[tuple[str, str], list[_Columns]] = defaultdict(list)
    marks: list[Mark] = []
    for path, *_ in key:
        file = _trace_file(path)
        own = file.read_on()
        shift = _shift(own, dict(ends))
        for lane, (start, end, kind, count) in own.items():
            columns[lane].append((start + shift, end + shift, kind, count))
        marks += [Mark(mark.time + shift, mark.name) for mark in file.marks]
    lanes = [_lane(*lane, columns[lane]) for lane in sorted(columns, key=_order)]
    return Trace(lanes, sorted(marks)) if lanes else None


#: Starts, ends, kinds and numbers of bars.
_Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class _TraceFile:
    """A trace file, read as far as it was written; `read_on` continues there, for a page that follows a run."""

    def __init__(self, path: Path, inode: int) -> None:
        self.inode, self.offset, self.marks = inode, 0, list[Mark]()
        self._path = path
        self._lanes: dict[tuple[str, str], tuple[array[float], array[float], array[int], array[int]]] = {}
        self._processes: dict[int, str] = {}
        self._threads: dict[tuple[int, int], tuple[str, str]] = {}

    def read_on(self) -> dict[tuple[str, str], _Columns]:
        """The file's bars by lane, on the clock of the file; a line that is not whole yet is left for the next call."""
        with self._path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                words = line.decode("utf-8", "replace").strip().removeprefix("[").rstrip(",")
                if words and words != "]":
                    try:
                        event = json.loads(words)
                    except ValueError:
                        break
                    self._add(event)
                self.offset += len(line)
        types = ("f8", "f8", "u1", "i4")
        return {
            lane: cast(_Columns, tuple(np.array(own, kind) for own, kind in zip(columns, types, strict=True)))
            for lane, columns in self._lanes.items()
        }

    def _add(self, event: Mapping[str, Any]) -> None:
        pid, tid, form = event.get("pid", 0), event.get("tid", 0), event["ph"]
        if form == "X":
            lane = self._threads[pid, tid]
            if lane not in self._lanes:
                self._lanes[lane] = array("d"), array("d"), array("B"), array("i")
            start, end, kinds, counts = self._lanes[lane]
            kind, count = _kind(event)
            start.append(event["ts"] * 1e-6)
            end.append((event["ts"] + event["dur"]) * 1e-6)
            kinds.append(kind)
            counts.append(count)
        elif form == "i":
            self.marks.append(Mark(event["ts"] * 1e-6, event["name"]))
        elif form == "M" and event["name"] == "process_name":
            self._processes[pid] = event["args"]["name"]
        elif form == "M" and event["name"] == "thread_name":
            self._threads[pid, tid] = (self._processes[pid], event["args"]["name"])


#: The files of the run that was read last.
_FILES: dict[Path, _TraceFile] = {}


def _trace_file(path: Path) -> _TraceFile:
    for other in [other for other in _FILES if other.parent != path.parent]:
        del _FILES[other]
    found, now = _FILES.get(path), path.stat()
    if found is None or found.inode != now.st_ino or found.offset > now.st_size:
        found = _FILES[path] = _TraceFile(path, now.st_ino)
    return found


def _kind(event: Mapping[str, Any]) -> tuple[int, int]:
    """The bar's kind, and its number: update 17 for `update 17`, 4 requests for `4 requests`."""
    name, _, rest = event["name"].partition(" ")
    if rest == "requests":
        return _PLACES["forward"], _whole(name)
    if not rest:
        return _PLACES.get(name, _OTHER), int(event["args"]["slots"]) if "args" in event else 1
    return _PLACES.get(name, _OTHER), _whole(rest)


def _whole(words: str) -> int:
    return int(words) if words.isdecimal() and len(words) < 10 else 0


def _shift(lanes: Mapping[tuple[str, str], _Columns], ends: Mapping[float, float]) -> float:
    """Seconds between the trace's clock and that of the run; 0 if no update is in both."""
    last: dict[int, float] = {}
    for _, end, kind, count in lanes.values():
        of_updates = kind == _PLACES["update"]
        for update, time in zip(count[of_updates].tolist(), end[of_updates].tolist(), strict=True):
            last[update] = max(time, last.get(update, time))
    both = [ends[update] - time for update, time in list(last.items())[:_MATCHED] if update in ends]
    return median(both) if both else 0.0


def _order(lane: tuple[str, str]) -> tuple[int, str, list[int], str]:
    process, name = lane
    known = _ROLES.index(process) if process in _ROLES else len(_ROLES)
    digits = "".join(c if c.isdigit() else " " for c in name).split()
    return known, process, [int(number) for number in digits], name


def _lane(process: str, name: str, columns: Sequence[_Columns]) -> Lane:
    start, end, kind, count = (np.concatenate(own) for own in zip(*columns, strict=True))
    order = np.argsort(start, kind="stable")
    return Lane(process, name, start[order], end[order], kind[order], count[order])


# ------------------------------------------------------------ the timeline


def timeline(run: Run, name: str) -> list[Part]:
    """The timeline of all stations, from the whole run to one chunk step; none without a trace."""
    trace = read_trace(run)
    if trace is None:
        return []
    caption = (
        "A row for each simulator thread, generator, scorer and the trainer; open a simulator to see its slots. Filled "
        "bars are work, the hatched ground between them is idle time (a bubble), whose share of the shown time is at "
        "the right. A slot is a group of environment rows that ask for actions together; a ticket is the right to run "
        "one episode, or one segment of it; thin bars of a slot say what it waits for."
    )
    first, last = trace.span
    used = {int(kind) for lane in trace.lanes for kind in np.unique(lane.kind)}
    part = {
        "kind": "timeline",
        "id": name,
        "first": float(first),
        "last": float(last),
        **_blocks(trace.lanes, first, last),
        "kinds": [{**kind._asdict(), "used": place in used} for place, kind in enumerate(KINDS)],
        "lanes": [
            {
                "name": lane.name,
                "role": lane.process,
                "station": _station(lane),
                "idles": lane.process in _ROLES and not lane.name.endswith(_BESIDE),
            }
            for lane in trace.lanes
        ],
        "marks": [mark for mark in run_marks(run) if mark["x"].get("time") is not None],
        "notes": [{"time": mark.time, "name": mark.name} for mark in trace.marks],
    }
    return [text(caption, "soft"), part]


def _blocks(lanes: Sequence[Lane], first: float, last: float) -> Part:
    """The bars in blocks by the time of their start, so that a page that is open is sent only the blocks that have
    changed: {unit: seconds of a step of time, window: steps of a block, blocks: [{counts: bars by lane, start, length,
    kind_of, number}]}.

    A start is the distance to that of the bar before it, of a lane's first bar in a block to the block's begin. Unit
    and window are powers of two (of microseconds, of units): with a longer trace both stay until it has doubled.
    """
    unit = 1e-6 * 2 ** max(0, math.ceil(math.log2(max(last - first, 1e-6) / 1e-6 / _STEPS)))
    counts = [len(lane.start) for lane in lanes]
    lane_of = np.repeat(np.arange(len(lanes)), counts)
    starts, ends = (np.concatenate([getattr(lane, name) for lane in lanes]) for name in ("start", "end"))
    # Not at halves, where the rounding of a trace's shift would decide.
    begin, end = (np.floor((times - first) / unit + 0.3).astype(np.int64) for times in (starts, ends))
    bits = max(0, int(end.max()).bit_length() - _BLOCK_BITS)
    window = begin >> bits
    order = np.argsort(window, kind="stable")
    begin, window, lane_of = begin[order], window[order], lane_of[order]
    start, heads = np.diff(begin, prepend=0), np.ones(len(begin), np.bool_)
    heads[1:] = (window[1:] != window[:-1]) | (lane_of[1:] != lane_of[:-1])
    start[heads] = begin[heads] - (window[heads] << bits)
    columns = {
        "start": start.astype(np.int32),
        "length": (end[order] - begin).astype(np.int32),
        "kind_of": np.concatenate([lane.kind for lane in lanes])[order],
        "number": np.concatenate([lane.number for lane in lanes])[order],
    }
    edges = np.searchsorted(window, np.arange(window[-1] + 2)).tolist()
    blocks = [
        {
            "counts": np.bincount(lane_of[a:b], minlength=len(lanes)).tolist(),
            **{name: packed(column[a:b]) for name, column in columns.items()},
        }
        for a, b in pairwise(edges)
    ]
    return {"unit": unit, "window": 1 << bits, "blocks": blocks}


def _station(lane: Lane) -> str:
    """Of `simulator-0.1/2` `simulator-0.1`: the thread that steps the slot."""
    return lane.name.rpartition("/")[0] if lane.process == "slots" else lane.name


def packed(values: np.ndarray) -> str:
    """Base64 of the compressed (zlib) bytes of an array, little-endian: first the lowest byte of every element, then
    the next, since the higher ones of small numbers are all alike."""
    planes = values.astype(values.dtype.newbyteorder("<")).view(np.uint8).reshape(len(values), values.itemsize).T
    return base64.b64encode(zlib.compress(planes.tobytes(), 6)).decode("ascii")


# ------------------------------------------------------------ waits and batches


def waits(run: Run, name: str) -> list[Part]:
    """What slots and stations did and waited for: shares of the traced time, and of slots over time."""
    trace = read_trace(run)
    if trace is None:
        return []
    roles = [role for role in _ROLES if any(lane.process == role for lane in trace.lanes)]
    shares = {role: _shares([lane for lane in trace.lanes if _works_in(lane, role)]) for role in roles}
    content = [
        BarSeries(kind.label, kind.colour, [shares[role].get(place) for role in roles])
        for place, kind in enumerate(KINDS)
        if any(place in own for own in shares.values())
    ]
    idle = [None if role == "slots" else max(0.0, 1.0 - sum(shares[role].values())) for role in roles]
    content.append(BarSeries("station is idle", 6, idle))
    parts = [bars(f"{name}-shares", "Shares of the traced time", roles, content, unit="share", stacked=True)]
    slots = [lane for lane in trace.lanes if lane.process == "slots"]
    if slots:
        parts.append(_over_time(slots, trace.span, name, run))
    return parts


def _works_in(lane: Lane, role: str) -> bool:
    """Whether the lane's bars count towards the role's time: publications have a lane beside the trainer's."""
    return lane.process == role and not lane.name.endswith(_BESIDE)


def _shares(lanes: Sequence[Lane]) -> dict[int, float]:
    """Share of the lanes' time by kind."""
    whole = sum(float(lane.end.max() - lane.start[0]) for lane in lanes)
    seconds: dict[int, float] = defaultdict(float)
    for lane in lanes:
        lengths = np.bincount(lane.kind, weights=lane.end - lane.start)
        for place in np.flatnonzero(lengths):
            seconds[int(place)] += float(lengths[place])
    return {place: own / whole for place, own in seconds.items()} if whole > 0 else {}


def _over_time(slots: Sequence[Lane], span: tuple[float, float], name: str, run: Run) -> Part:
    edges = np.linspace(*span, _COLUMNS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    start, end, kind = (np.concatenate([getattr(lane, of) for lane in slots]) for of in ("start", "end", "kind"))
    begun, ended = np.array([lane.start[0] for lane in slots]), np.array([lane.end.max() for lane in slots])
    traced = np.diff(time_before(begun, ended, edges))
    curves = []
    for place in (place for place, one in enumerate(KINDS) if one.role == "slots"):
        own = kind == place
        if own.any():
            busy = np.diff(time_before(start[own], end[own], edges)) / np.maximum(traced, 1e-9)
            one = KINDS[place]
            curves.append(series(one.label, one.colour, {"time": middles.tolist()}, busy.tolist(), style="area"))
    return chart(
        f"{name}-time",
        "What slots did and waited for",
        Scale("share of the slots' time", 0.0, 1.0, percent=True),
        curves,
        x={"time": "time since the run began"},
        marks=run_marks(run),
    )


def time_before(start: np.ndarray, end: np.ndarray, edges: np.ndarray) -> NDArray[np.float64]:
    """Seconds of the bars that lie before each edge: of starts before it the time since, less the same of ends."""

    def since(times: np.ndarray) -> NDArray[np.float64]:
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        return np.asarray(count * edges - sums[count])

    return since(start) - since(end)


def batch_sizes(run: Run, name: str) -> list[Part]:
    """A histogram of the requests in a forward pass."""
    trace = read_trace(run)
    passes = [lane.number[lane.kind == _PLACES["forward"]] for lane in trace.lanes] if trace else []
    found = np.concatenate(passes) if passes else np.zeros(0, dtype=np.int32)
    if not len(found):
        return []
    sizes, counts = np.unique(found, return_counts=True)
    one = series("forward passes", 0, {"requests": sizes.tolist()}, (counts / len(found)).tolist(), style="bars")
    scale = Scale("share of passes", percent=True)
    return [chart(f"{name}-sizes", "Requests in a forward pass", scale, [one], x={"requests": "requests"})]
