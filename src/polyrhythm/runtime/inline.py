"""Hosts all stations in this process and thread (`launcher: inline`), taking turns.

Training and rollout interleave at the grain of one unit of work, in an order that depends on the commands alone,
so a lock-step run is reproducible bit for bit. Nothing here runs unless `receive` is called.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from polyrhythm.runtime.factories import StationContext, StationList
from polyrhythm.runtime.hosting import Joined
from polyrhythm.runtime.leased import make_parts
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Channels, Order, Reply, Report, Spans, Station
from polyrhythm.runtime.spans import SpanLog
from polyrhythm.scheduler import records

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.weights import Weights


class InlineHosting:
    """Hosts `stations`, and measures how long each was busy. arena, weights: the memory that they share."""

    def __init__(
        self,
        stations: StationList,
        arena: Arena,
        weights: Weights,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._arena, self._weights = clock, arena, weights
        self._stations = list(stations)
        self._work_done = 0
        self._parts: list[_Part] = []
        self._by_name: dict[str, Station] = {}
        self._by_slot: dict[str, Station] = {}
        self._turns: deque[_Part] = deque()
        self._events: deque[records.Event] = deque()
        self._reports: list[Report] = []
        self._measuring = self._closed = False

    def start(self) -> list[Joined]:
        """Make all stations; their announcements, in the order of the stations."""
        channels = Channels(self._events.append, self._deliver, self._reports.append)
        joined: list[Joined] = []
        for factory, *seats in self._stations:
            assert len(seats) == 1, f"{factory.name}: in one process there is one rank"
            seat = seats[0]
            offload = seat.offload if seat.leases else None
            context = StationContext(self._arena, lambda: self._weights, channels, seat.device, offload=offload)
            parts = make_parts(factory, context, 0, seat)
            announcements = [self._host(_Part(factory.name, make())) for _, make in parts]
            together = records.merge_joined(announcements)
            assert isinstance(together, Joined)
            joined.append(together)
        return joined

    def _host(self, part: _Part) -> Joined:
        """Add the part after those that are here: turns follow the order of the stations. Its announcement."""
        self._parts.append(part)
        joined = part.station.joined()
        part.spans.on = self._measuring
        self._turns.append(part)
        self._by_name[part.name] = part.station
        if isinstance(joined, records.SimulatorJoined):
            self._by_slot |= {slot.slot: part.station for info in joined.batches for slot in info.slots}
        return joined

    def _deliver(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            self._by_slot[reply.slot].deliver(reply)  # type: ignore[attr-defined]

    def reaches(self, station: str) -> bool:  # noqa: ARG002
        """Always: a station that raises ends the run."""
        return True

    def send(self, station: str, command: Order, slot: str = "") -> None:
        if isinstance(command, records.TakeDevice | records.YieldDevice):
            for part in self._parts:
                if part.name == station:
                    part.station.handle(command)
            return
        (self._by_slot[slot] if slot else self._by_name[station]).handle(command)

    def receive(self, timeout: float) -> records.Event | None:
        """The next event, or None after `timeout` seconds.

        Consumes: station turns, one unit of work each, round robin. Waits for: an event.
        Unblocked by: a unit that emits one, or the timeout. Produces: that event.
        """
        events = self._events
        if not events:
            self._work(self._clock() + timeout)
        return events.popleft() if events else None

    def _work(self, until: float) -> None:
        """Give turns until there is an event, or until the time is over."""
        idle, events, turns, clock = 0, self._events, self._turns, self._clock
        now = clock()
        while idle < len(turns):
            part = turns[0]
            turns.rotate(-1)
            if part.station.work():
                begin, now = now, clock()
                part.busy_s += now - begin
                self._work_done += 1
                if part.spans.on:
                    part.spans.add(part.station.spans(begin, now))
                    now = clock()
                idle = 0
            else:
                idle += 1
            if events or now >= until:
                return
        if (rest := until - clock()) > 0:
            time.sleep(rest)

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def measure_spans(self, on: bool) -> None:
        """Whether stations, those that are still to come included, say what they do."""
        self._measuring = on
        for part in self._parts:
            part.spans.on = on

    def take_spans(self) -> list[Spans]:
        """What stations did since the last call."""
        taken = [(part.name, *part.spans.take()) for part in self._parts]
        return [Spans(name, 0, tuple(spans), lost) for name, spans, lost in taken if spans or lost]

    def work_done(self) -> int:
        """Units of work done so far, over all stations."""
        return self._work_done

    def pending_work(self) -> list[str]:
        """What stations have not finished, in words, for a stall report."""
        return [line for part in self._parts for line in part.station.pending_work()]

    def current_call(self, station: str) -> str:  # noqa: ARG002
        """Nothing: whoever asks has this thread, so no station is at work."""
        return ""

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's own counters over its parts, with `busy_s`."""
        found: dict[str, dict[str, float]] = {}
        for part in self._parts:
            counts = found.setdefault(part.name, {"busy_s": 0.0})
            for name, value in {"busy_s": part.busy_s, **part.station.statistics()}.items():
                counts[name] = counts.get(name, 0.0) + value
        return found

    def latest(self) -> dict[str, dict[str, float]]:
        """The same: here nobody has to be asked."""
        return self.statistics()

    def dropped(self) -> dict[str, int]:
        """None: here nothing is sent."""
        return {}

    def processes(self) -> dict[str, int]:
        """None: stations live in this process."""
        return {}

    def close(self) -> None:
        """Close all stations, those after one that raises too; a second call does nothing."""
        closed, self._closed = self._closed, True
        with ExitStack() as stack:
            for part in reversed(self._parts if not closed else []):
                stack.callback(part.station.close)


class _Part:
    """A part of a station, how long it was busy, and with what, while that is measured."""

    def __init__(self, name: str, station: Station) -> None:
        self.name, self.station, self.busy_s = name, station, 0.0
        self.spans = SpanLog()
