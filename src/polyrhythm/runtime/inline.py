"""Hosts all stations in this process and thread (`launcher: inline`), taking turns.

Training and rollout interleave at the grain of one unit of work, in an order that depends on the commands alone,
so a lock-step run is reproducible bit for bit. Nothing here runs unless `receive` is called. A station that somebody
joins is announced when they have, and made anew when they are gone.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from polyrhythm.runtime.factories import (
    NOBODY_JOINS,
    Joining,
    Resources,
    StationContext,
    StationFactory,
    StationList,
    make_parts,
)
from polyrhythm.runtime.hosting import StationView
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import (
    Channels,
    Departed,
    Event,
    Joined,
    Order,
    Reply,
    Report,
    Spans,
    Station,
    add_counts,
    merge_joined,
)
from polyrhythm.runtime.spans import SpanLog
from polyrhythm.runtime.transport.sockets import wait_for
from polyrhythm.scheduler import records

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.weights import Weights


log = logging.getLogger(__name__)

#: Seconds between two looks at who has joined.
_ATTEND_S = 0.5


class InlineHosting:
    """Hosts `stations`, and measures how long each was busy. arena, weights: the memory that they share; joining: the
    stations that somebody joins."""

    def __init__(
        self,
        stations: StationList,
        arena: Arena,
        weights: Weights,
        clock: Callable[[], float] = time.monotonic,
        joining: Joining = NOBODY_JOINS,
    ) -> None:
        self._clock, self._arena, self._weights, self._joining = clock, arena, weights, joining
        self._stations = list(stations)
        self._awaiting: dict[str, _Part] = {}  # parts that nobody has joined yet, by station
        self._attended: list[_Part] = []  # those that somebody has
        self._known: dict[str, int] = {}  # their incarnations of which `receive` has told
        self._past: dict[str, dict[str, float]] = {}  # counters of stations that were joined
        self.work_done = 0
        self.drops: Mapping[str, int] = {}  # nothing is sent here; stations that are joined count their own
        self._parts: list[_Part] = []
        self._by_name: dict[str, Station] = {}
        self._by_slot: dict[str, tuple[Station, Callable[[Reply], None] | None]] = {}  # with its `deliver`
        self._turns: deque[_Part] = deque()
        self._events: deque[Event] = deque()
        self._reports: list[Report] = []
        self._channels = Channels(self._events.append, self._deliver, self._reports.append)
        self._measuring = self._closed = False

    def start(self) -> list[Joined]:
        joined: list[Joined] = []
        for factory, *seats in self._stations:
            assert len(seats) == 1, f"{factory.name}: in one process there is one rank"
            made = (_Part(factory.name, station) for station in self._make(factory, seats[0], 0))
            if factory.name in self._joining.stations:
                self._awaiting[factory.name] = next(made)
                continue
            joined.append(merge_joined([self._host(part) for part in made]))
        while len(self._attended) < self._joining.needed:
            self._wait(_ATTEND_S)
            joined += self._admit()
            for part in list(self._attended):
                self._work_of(part)  # others who want to join there are told that it is taken
        self._known = {part.name: part.incarnation for part in self._attended}
        return joined

    def _make(self, factory: StationFactory, seat: Resources, incarnation: int) -> Iterator[Station]:
        context = StationContext(self._arena, lambda: self._weights, self._channels, seat.torch_device)
        return (make() for _, make in make_parts(factory, context, incarnation, seat))

    # ------------------------------------------------------------ stations that are joined

    def _admit(self) -> list[Joined]:
        """Host the stations that somebody has joined by now; their announcements."""
        admitted: list[Joined] = []
        for name, part in list(self._awaiting.items()):
            attend = part.station.traits.attend
            if attend is not None and attend(0.0):
                del self._awaiting[name]
                self._attended.append(part)
                admitted.append(self._host(part))
        return admitted

    def _depart(self, part: _Part, departed: Departed) -> None:
        """The joined simulator is gone: the station is lost, and its next incarnation is open."""
        name, incarnation = part.name, part.incarnation
        log.warning("the simulator that had joined as %s %s; its place is open again", name, departed)
        add_counts(self._past.setdefault(name, {}), part.statistics())
        part.station.close()
        self._parts.remove(part)
        self._attended.remove(part)
        self._turns.remove(part)
        self._by_slot = {slot: found for slot, found in self._by_slot.items() if found[0] is not part.station}
        self._events.append(records.StationLost(name, incarnation, str(departed), departed.blame))
        factory, seat = next((factory, seats[0]) for factory, *seats in self._stations if factory.name == name)
        self._awaiting[name] = _Part(name, next(self._make(factory, seat, incarnation + 1)))

    def _wait(self, seconds: float) -> None:
        sockets = [part.station.traits.socket for part in (*self._attended, *self._awaiting.values())]
        self.work_done += len(self._attended) < self._joining.needed
        if sockets:
            wait_for(sockets, seconds)
        else:
            time.sleep(seconds)

    def _host(self, part: _Part) -> Joined:
        """Add the part after those that are here: turns follow the order of the stations. Its announcement."""
        self._parts.append(part)
        joined = part.station.joined()
        part.spans.on = self._measuring
        self._turns.append(part)
        self._by_name[part.name] = part.station
        if isinstance(joined, records.SimulatorJoined):
            slots = [slot.slot for info in joined.batches for slot in info.slots]
            self._by_slot |= dict.fromkeys(slots, (part.station, part.station.traits.deliver))
        return joined

    def _deliver(self, replies: Sequence[Reply]) -> None:
        for reply in replies:
            _, deliver = self._by_slot.get(reply.slot, (None, None))
            if deliver is not None:  # else who had joined is gone
                deliver(reply)

    @property
    def names(self) -> Sequence[str]:
        return [factory.name for factory, *_ in self._stations]

    def station(self, name: str) -> StationView:
        return _InlineStation(self, name)

    def reaches(self, station: str) -> bool:
        """Always, as a station that raises ends the run; but a station that is joined comes and goes."""
        if station not in self._joining.stations:
            return True
        known = self._known.get(station, -1)
        return any(part.name == station and part.incarnation == known for part in self._attended)

    def send(self, station: str, command: Order, slot: str = "") -> None:
        if not self.reaches(station):
            return
        if isinstance(command, records.TakeDevice | records.YieldDevice):
            for part in self._parts:
                if part.name == station:
                    part.station.handle(command)
            return
        (self._by_slot[slot][0] if slot else self._by_name[station]).handle(command)

    def receive(self, timeout: float) -> Event | None:
        """The next event, or None after `timeout` seconds.

        Consumes: station turns, one unit of work each, round robin. Waits for: an event.
        Unblocked by: a unit that emits one, or the timeout. Produces: that event.
        """
        if not self._events:
            self._work(self._clock() + timeout)
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, records.SimulatorJoined):
            self._known[event.simulator] = event.incarnation
        elif isinstance(event, records.StationLost) and self._known.get(event.station) == event.incarnation:
            del self._known[event.station]
        return event

    def _work(self, until: float) -> None:
        idle, events, turns, clock = 0, self._events, self._turns, self._clock
        now = clock()
        if self._awaiting:
            events += self._admit()
        while idle < len(turns):
            part = turns[0]
            turns.rotate(-1)
            if self._work_of(part):
                begin, now = now, clock()
                part.busy_s += now - begin
                self.work_done += 1
                if part.spans.on:
                    part.spans.add(part.station.spans(begin, now))
                    now = clock()
                idle = 0
            else:
                idle += 1
            if events or (now >= until and not idle):  # turns without work take no time
                return
        if (rest := until - clock()) > 0:
            self._wait(rest)

    def _work_of(self, part: _Part) -> bool:
        try:
            return part.station.work()
        except Departed as departed:
            self._depart(part, departed)
            return True

    def reports(self) -> list[Report]:
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def set_tracing(self, on: bool) -> None:
        self._measuring = on
        for part in self._parts:
            part.spans.on = on

    def spans(self) -> list[Spans]:
        taken = [(part.name, *part.spans.take()) for part in self._parts]
        return [Spans(name, 0, tuple(spans), lost) for name, spans, lost in taken if spans or lost]

    def pending_work_of(self, name: str) -> list[str]:
        return [line for part in self._parts if part.name == name for line in part.station.pending_work()]

    def statistics(self, *, fresh: bool = False, pending_work: bool = False) -> dict[str, dict[str, float]]:  # noqa: ARG002
        found = {name: dict(past) for name, past in self._past.items()}
        for part in (*self._parts, *self._awaiting.values()):
            add_counts(found.setdefault(part.name, {"busy_s": 0.0}), part.statistics())
        return found

    def close(self) -> None:
        closed, self._closed = self._closed, True
        with ExitStack() as stack:
            for part in reversed([*self._parts, *self._awaiting.values()] if not closed else []):
                stack.callback(part.station.close)


class _InlineStation:
    """A station in this thread. Whoever asks has the thread, so it has no call under way."""

    host, clock = "", None
    processes: Mapping[str, int] = {}

    def __init__(self, hosting: InlineHosting, name: str) -> None:
        self._hosting, self._name = hosting, name

    @property
    def reachable(self) -> bool:
        return self._hosting.reaches(self._name)

    def current_call(self) -> str:
        return ""

    def pending_work(self) -> Sequence[str]:
        return self._hosting.pending_work_of(self._name)


class _Part:
    def __init__(self, name: str, station: Station) -> None:
        self.name, self.station, self.busy_s = name, station, 0.0
        self.spans = SpanLog()

    @property
    def incarnation(self) -> int:
        return self.station.joined().incarnation

    def statistics(self) -> dict[str, float]:
        return {"busy_s": self.busy_s, **self.station.statistics()}
