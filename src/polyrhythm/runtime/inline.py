"""The launcher `inline`: all stations in this process and thread, taking turns.

Training and rollout interleave at the grain of one unit of work, in an order that depends on the commands alone,
so a lock-step run is reproducible bit for bit. Nothing here runs unless `receive` is called.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from polyrhythm.flow import records
from polyrhythm.runtime.messages import Reply, Report, Station
from polyrhythm.runtime.payloads import InlinePayloads


class InlineLauncher:
    """Hosts stations, carries their events, replies and reports, and measures how long each was busy.

    `emit`, `reply` and `report` are the callbacks that stations get; `busy_s` by station name counts the time in
    units of work.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.payloads = InlinePayloads()
        self.busy_s: dict[str, float] = {}
        self._work_done = 0
        self._stations: dict[str, Station] = {}
        self._turns: deque[Station] = deque()
        self._events: deque[records.Event] = deque()
        self._reports: deque[Report] = deque()
        self._deliver: dict[str, Callable[[Reply], None]] = {}

    def add(self, station: Station) -> None:
        """Host a station; turns follow the order of adding."""
        assert station.name not in self._stations, f"two stations are called {station.name}"
        self._stations[station.name] = station
        self._turns.append(station)
        self.busy_s[station.name] = 0.0

    def connect(self, slot: str, deliver: Callable[[Reply], None]) -> None:
        """Replies for `slot` go to `deliver`."""
        self._deliver[slot] = deliver

    def emit(self, event: records.Event) -> None:
        self._events.append(event)

    def reply(self, reply: Reply) -> None:
        self._deliver[reply.slot](reply)

    def report(self, report: Report) -> None:
        self._reports.append(report)

    def reports(self) -> list[Report]:
        """The reports since the last call, oldest first."""
        reports = list(self._reports)
        self._reports.clear()
        return reports

    def send(self, command: records.Command) -> None:
        """Hand a command to the station that it addresses; `ReleasePayloads` goes to the payload store."""
        match command:
            case records.ReleasePayloads(handles):
                self.payloads.release(handles)
            case (
                records.StartRows(simulator=station) | records.CancelRow(simulator=station)
                | records.RefuseRequest(simulator=station)
                | records.Serve(generator=station) | records.ApplyWeights(generator=station)
                | records.LendSamples(trainer=station) | records.PublishWeights(trainer=station)
            ):  # fmt: skip
                self._stations[station].handle(command)
            case _:
                raise TypeError(f"{type(command).__name__} is not for a station")

    def receive(self, timeout: float | None) -> records.Event | None:
        """The next event, or None after `timeout` seconds (None: as soon as no station has work).

        Consumes: station turns, one unit of work each, round robin. Waits for: an event.
        Unblocked by: a unit that emits one, or the timeout. Produces: that event.
        """
        if self._events:
            return self._events.popleft()
        until = None if timeout is None else self.clock() + timeout
        idle = 0
        while idle < len(self._turns):
            idle = 0 if self._turn() else idle + 1
            if self._events:
                return self._events.popleft()
            if until is not None and self.clock() >= until:
                return None
        if until is not None and (rest := until - self.clock()) > 0:
            time.sleep(rest)
        return None

    def _turn(self) -> bool:
        station = self._turns[0]
        self._turns.rotate(-1)
        begin = time.perf_counter()
        worked = station.work()
        if worked:
            self._work_done += 1
            self.busy_s[station.name] += time.perf_counter() - begin
        return worked

    def work_done(self) -> int:
        """Units of work done so far, over all stations."""
        return self._work_done

    def outstanding(self) -> list[str]:
        """What is waiting, in words, for a stall report."""
        return [line for station in self._stations.values() for line in station.outstanding()]

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's own counters, with `busy_s`."""
        return {name: {"busy_s": self.busy_s[name], **station.statistics()} for name, station in self._stations.items()}

    def transitions(self) -> float:
        """Env steps of active rows so far, over all simulators."""
        return sum(station.statistics().get("env_steps", 0.0) for station in self._stations.values())

    def close(self) -> None:
        for station in self._stations.values():
            station.close()
