"""The launcher `inline`: all stations in this process and thread, taking turns.

Training and rollout interleave at the grain of one unit of work, in an order that depends on the commands alone,
so a lock-step run is reproducible bit for bit. Nothing here runs unless `receive` is called.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from polyrhythm.runtime.factories import Resources, StationContext, StationFactory
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.memory.blocks import BlockPool
from polyrhythm.runtime.memory.weights import InlineWeights
from polyrhythm.runtime.messages import Channels, Reply, Report, SaveTrainer, Spans, StartRowsInBlocks, Station
from polyrhythm.runtime.spans import SpanLog
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout


class InlineLauncher:
    """Hosts stations, carries their events, answers and reports, and measures how long each was busy."""

    def __init__(
        self,
        jobs: Sequence[tuple[StationFactory, Resources]],
        layout: ArenaLayout,
        weights: WeightsLayout,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock, self.layout = clock, layout
        self.pool = BlockPool(layout.blocks)
        self.arena: Arena = in_memory(layout)
        self.weights = InlineWeights(weights)
        self._jobs = list(jobs)
        self._work_done = 0
        self._parts: list[_Part] = []
        self._by_name: dict[str, Station] = {}
        self._by_slot: dict[str, Station] = {}
        self._turns: deque[_Part] = deque()
        self._events: deque[records.Event] = deque()
        self._reports: list[Report] = []
        self._measuring = False

    def start(self) -> list[records.Event]:
        """Make all stations; their announcements, in the order of the jobs."""
        links = Channels(self._events.append, self._deliver, self._report)
        joined = []
        for job, seat in self._jobs:
            host = StationContext(self.arena, lambda: self.weights, links, seat.device)
            parts = [_Part(job.name, make()) for _, make in job.parts(host, incarnation=0)]
            announcements = [part.station.joined() for part in parts]
            for part, announcement in zip(parts, announcements, strict=True):
                self._host(part, announcement)
            joined.append(records.merge_joined(announcements))
        return joined

    def _host(self, part: _Part, joined: records.Event) -> None:
        """Turns follow the order of the jobs."""
        part.spans.on = self._measuring
        self._parts.append(part)
        self._turns.append(part)
        self._by_name[part.name] = part.station
        if isinstance(joined, records.SimulatorJoined):
            self._by_slot |= {slot.slot: part.station for info in joined.batches for slot in info.slots}

    def _report(self, report: Report) -> None:
        self._reports.append(report)

    def _deliver(self, reply: Reply) -> None:
        self._by_slot[reply.slot].deliver(reply)  # type: ignore[attr-defined]

    def send(self, command: records.Command | SaveTrainer) -> None:
        """Hand a command to the station that it addresses; `ReleasePayloads` goes to the pool of blocks."""
        match command:
            case records.Serve(generator=station):  # first, being most of all
                self._by_name[station].handle(command)
            case records.ReleasePayloads(payload_ids):
                self.pool.release(payload_ids)
            case records.StartRows(slot=slot):
                self._by_slot[slot].handle(StartRowsInBlocks(command, tuple(self.pool.assign(command))))
            case records.CancelRow(slot=slot) | records.RefuseRequest(slot=slot):
                self._by_slot[slot].handle(command)
            case (
                records.ApplyWeights(generator=station) | records.StartUpdate(trainer=station)
                | records.PublishWeights(trainer=station) | SaveTrainer(trainer=station)
            ):  # fmt: skip
                self._by_name[station].handle(command)
            case _:
                raise TypeError(f"{type(command).__name__} is not for a station")

    def receive(self, timeout: float) -> records.Event | None:
        """The next event, or None after `timeout` seconds.

        Consumes: station turns, one unit of work each, round robin. Waits for: an event.
        Unblocked by: a unit that emits one, or the timeout. Produces: that event.
        """
        events = self._events
        if not events:
            self._work(self.clock() + timeout)
            if not events:
                return None
        event = events.popleft()
        self.pool.hear(event)
        return event

    def _work(self, until: float) -> None:
        """Give turns until there is an event, or until the time is over."""
        idle, events, turns, clock = 0, self._events, self._turns, self.clock
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
        reports, self._reports = self._reports, []
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

    def outstanding(self) -> list[str]:
        """What is waiting, in words, for a stall report."""
        return [line for part in self._parts for line in part.station.outstanding()]

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

    def close(self) -> None:
        for part in self._parts:
            part.station.close()


class _Part:
    """A part of a station, how long it was busy, and with what, while that is measured."""

    def __init__(self, name: str, station: Station) -> None:
        self.name, self.station, self.busy_s = name, station, 0.0
        self.spans = SpanLog()
