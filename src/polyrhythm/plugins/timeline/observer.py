"""The timeline of a run, trace.json, for Perfetto and the report: spans measured by stations, arranged in lanes.

The bars of a slot's lane do not overlap and leave no gap from the slot's first unit of work to its last:

    stepping, resetting   the simulator's thread works for the slot; work shared with n slots has {"slots": n}
    tickets               no row of the slot has a ticket
    thread                the slot could continue, but its thread is busy with another slot or waits for slots that
                          step together, or the ticket or answer is in transit
    generator             its request waits for a generator
    in_batch              a generator computes its answer

Bars of other hosts are shifted to main's clock; a mark tells the shift and its uncertainty. Invariant: over the lanes
of a simulator, stepping and resetting, each divided by its `slots`, add up to the busy time of its threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.hooks import RunHooks
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.runtime import spans as kinds
from polyrhythm.runtime.hosting import station_hosts
from polyrhythm.runtime.hosts import ClockOffset
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.runtime.spans import Span
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: Seconds between two collections of new spans, and between two writes.
_LOOK_S, _WRITE_S = 0.25, 0.02
#: Spans written at a time: this number, or this share of a longer backlog, so that no event waits for long.
_AT_ONCE, _SHARE = 32, 16
#: Seconds after which a span that has not arrived is given up; spans arrive twice a second.
_LATEST_S = 5.0

_PROCESSES = {kinds.PASS: "generators", kinds.APPLY: "generators"} | dict.fromkeys(
    (kinds.UPDATE, kinds.PUBLISH, kinds.SAVE), "trainer"
)
_PROCESSES[kinds.SCORE] = "scorers"


class TraceObserver(Observer):
    """Enables tracing in the stations of `launcher` and writes their spans as bars, from the time `began` on.

    After `limit` bars (80 MB) it writes a mark and disables tracing, because viewers cope badly with more. A mark tells
    how many spans a station has dropped for lack of room.
    """

    hears: ClassVar[tuple[type, ...]] = (
        records.StationLost,
        records.StartRows,
        records.BatchingChosen,
        records.MoveChosen,
    )
    tick_s: ClassVar[float] = _WRITE_S

    def __init__(self, writer: TraceWriter, launcher: Launcher, began: float, limit: int = 1_000_000) -> None:
        self._writer, self._launcher, self._began, self._left = writer, launcher, began, limit
        self._looked = began
        self._spans: deque[Span] = deque()
        self._waits: dict[tuple[str, int], list[Span]] = {}  # by slot and request, until a generator reports it
        self._served: dict[str, dict[int, Span]] = {}  # by slot and request, while a wait may follow
        self._granted: dict[str, deque[float]] = {}
        self._unit_began: dict[str, float] = {}
        self._clocks: dict[str, ClockOffset] = {}  # of other hosts, as they were last marked
        launcher.hosting.set_tracing(True)

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if self._left <= 0:
            return
        if isinstance(event, records.StationLost):  # the next incarnation restarts its request numbers
            own = f"{event.station}."
            self._served = {slot: served for slot, served in self._served.items() if not slot.startswith(own)}
        for command in commands:
            match command:
                case records.StartRows(slot=slot):
                    self._granted.setdefault(slot, deque()).append(now)
                case records.BatchingChosen(max_requests=max_requests, max_wait_s=max_wait_s, reason=reason):
                    name = f"up to {max_requests} requests, {1000.0 * max_wait_s:.3g} ms"
                    self._mark("generators", "batching", name, now, {"reason": reason})
                case records.MoveChosen(outcome=outcome, move=move, reason=reason):
                    self._mark("run", "moves", f"{outcome}: {move}", now, {"reason": reason})

    def on_tick(self, now: float) -> None:
        if self._left <= 0:
            return
        if now >= self._looked + _LOOK_S:
            if not self._spans:  # all spans of the last collection are written
                self._give_up(self._looked - _LATEST_S)
            self._take(now)
        self._place(max(_AT_ONCE, len(self._spans) // _SHARE))
        if self._left <= 0:
            self._end(now)

    def finish(self, now: float) -> None:
        """Write all remaining spans, disable tracing and close the file."""
        if self._left > 0:
            self._take(now)
            self._place(len(self._spans))
            self._give_up(now)
            self._launcher.hosting.set_tracing(False)
        self._writer.close()

    def _end(self, now: float) -> None:
        self._mark("run", "timeline", "the timeline ends here, the run goes on", now)
        self._launcher.hosting.set_tracing(False)
        for held in (self._spans, self._waits, self._served, self._granted):
            held.clear()

    def _take(self, now: float) -> None:
        self._looked = now
        for said in self._launcher.hosting.spans():
            self._spans += said.spans
            if said.lost:
                self._mark("run", said.station, f"{said.lost} spans of {said.station} before this are missing", now)
                log.warning("%d spans of %s are missing in the timeline: they came too fast", said.lost, said.station)

        for name in self._launcher.hosting.names:
            station = self._launcher.hosting.station(name)
            clock, before = station.clock, self._clocks.get(station.host)
            if clock is None:
                continue
            # Marked once, and again when it has changed by more than its uncertainty.
            if before is None or abs(clock.ahead_s - before.ahead_s) > before.uncertainty_s + clock.uncertainty_s:
                host = station.host
                self._clocks[host] = clock
                hosts = station_hosts(self._launcher.hosting)
                stations = ", ".join(name for name, where in hosts.items() if where == host)
                self._mark("run", "clocks", f"the clock of {host} is {clock}", now, {"stations": stations})

    # ------------------------------------------------------------ spans to bars

    def _place(self, count: int) -> None:
        for _ in range(min(count, len(self._spans))):
            span = self._spans.popleft()
            match span.kind:
                case kinds.GENERATOR:
                    self._wait(span)
                case kinds.IN_BATCH:
                    self._served.setdefault(span.lane, {})[span.number] = span
                    for wait in self._waits.pop((span.lane, span.number), ()):
                        self._divide(wait, span)
                case kinds.TICKETS:
                    self._cut(span, (kinds.TICKETS, kinds.THREAD), (self._grant(span),))
                case kinds.STEPPING | kinds.RESETTING:
                    self._unit_began[span.lane] = span.begin
                    self._bar(span)
                case _:
                    self._bar(span)

    def _wait(self, wait: Span) -> None:
        """Divide a slot's wait for an answer once both the wait and the generator's span have arrived, in either order.

        A request may have several waits, since other rows of the slot can be reset meanwhile.
        """
        known = self._served.get(wait.lane, {})
        for number in [number for number in known if number < wait.number]:
            del known[number]
        if wait.number in known:
            self._divide(wait, known[wait.number])
        else:
            self._waits.setdefault((wait.lane, wait.number), []).append(wait)

    def _divide(self, wait: Span, served: Span) -> None:
        self._cut(wait, (kinds.GENERATOR, kinds.IN_BATCH, kinds.THREAD), (served.begin, served.end))

    def _grant(self, wait: Span) -> float:
        """When the ticket was granted that ended this wait: the first grant since the slot's previous unit of work."""
        granted = self._granted.get(wait.lane, deque())
        since = self._unit_began.get(wait.lane, wait.begin)
        while granted and granted[0] < since:
            granted.popleft()
        return granted[0] if granted else wait.begin

    def _cut(self, wait: Span, parts: Sequence[str], times: Sequence[float]) -> None:
        """Split a wait into parts of these kinds at these times, which are clipped to the wait."""
        begin = wait.begin
        for kind, time in zip(parts, (*times, wait.end), strict=True):
            end = min(max(begin, time), wait.end)
            if end > begin:
                self._bar(wait._replace(kind=kind, begin=begin, end=end))
            begin = end

    def _give_up(self, before: float) -> None:
        """Write waits that ended before that time without a generator's span: their requests were refused or lost."""
        for request in [request for request, waits in self._waits.items() if waits[-1].end < before]:
            for wait in self._waits.pop(request):
                self._bar(wait)

    def _bar(self, span: Span) -> None:
        if self._left <= 0 or span.begin < self._began:
            return
        process, name = _PROCESSES.get(span.kind, "slots"), span.kind
        # Publishing is concurrent with the update, so in a separate lane: viewers drop bars that overlap.
        lane = f"{span.lane} publishes" if span.kind == kinds.PUBLISH else span.lane
        if span.kind in (kinds.TAKE, kinds.YIELD):
            name = f"{span.lane} {'takes it' if span.kind == kinds.TAKE else 'leaves it'}"
            process, lane = "devices", f"device {span.number}" if span.number >= 0 else "host"
        elif span.kind == kinds.PASS:
            name = f"{span.number} requests"
        elif process != "slots":
            name = f"{span.kind} {span.number}"
        arguments = {"slots": span.slots} if span.slots > 1 else None
        self._writer.complete(process, lane, name, span.begin - self._began, span.end - self._began, arguments)
        self._left -= 1

    def _mark(self, process: str, lane: str, name: str, now: float, arguments: dict[str, str] | None = None) -> None:
        self._writer.instant(process, lane, name, now - self._began, arguments)


class TimelineHooks(RunHooks):
    def observers(self, pipeline: Pipeline) -> Sequence[Observer]:
        folder = pipeline.context.folder
        assert folder is not None, "a run that trains has a folder"
        return [TraceObserver(TraceWriter(_unused_path(folder)), pipeline.launcher, pipeline.loop.clock())]


def _unused_path(folder: Path) -> Path:
    """`trace.json`; of a resumed part `trace-2.json`, and so on."""
    path, number = folder / "trace.json", 1
    while path.exists():
        number += 1
        path = folder / f"trace-{number}.json"
    return path


HOOKS = TimelineHooks()
