"""CPU cost of the conductor: it handles one event at a time, and its commands are sent when it is done.

    event ─▶ queue of a thread ─▶ conductor.handle(event) ─▶ cost ─▶ commands are sent

With `serving: beside`, a thread on each host handles the serving events. The decisions are still those of a single
conductor with full knowledge: a serving half per host cannot decide better.

Invariants: a thread handles one event at a time, in the order of arrival. Commands reach a station in the order in
which they were decided.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.plugins.virtual.clustersim.clock import VirtualClock
from polyrhythm.plugins.virtual.clustersim.costs import Cost
from polyrhythm.scheduler.records import BatchDone, Command, Event, RequestArrived, StreamDone, Wake

#: The events of serving; `beside` also means that they and their commands do not cross a link.
SERVING: frozenset[type] = frozenset({RequestArrived, BatchDone, StreamDone})


@dataclass(slots=True)
class CpuThread:
    """A thread of the conductor. waiting: events with their arrival times."""

    waiting: deque[tuple[float, Event]] = field(default_factory=deque)
    at_work: bool = False
    busy_s: float = 0.0
    events: int = 0


class ConductorCpu:
    """The conductor's threads. decide: handles an event and returns its commands; send: sends one command. address:
    station of a command. cost: of an event, by the number of its commands."""

    def __init__(
        self,
        clock: VirtualClock,
        cost: Cost,
        seed: int,
        decide: Callable[[Event], list[Command]],
        send: Callable[[Command], None],
        address: Callable[[Command], str],
        *,
        beside: bool,
    ) -> None:
        self.threads: dict[str, CpuThread] = {"": CpuThread()}
        self.waited = 0.0
        self._clock, self._cost, self._decide, self._send, self._beside = clock, cost, decide, send, beside
        self._address, self._due = address, dict[str, float]()
        self._rng = random.Random(f"{seed}/conductor")

    @property
    def main(self) -> CpuThread:
        """The thread of tickets, samples and weights; of everything, unless serving is beside the generators."""
        return self.threads[""]

    def receive(self, event: Event, host: str) -> None:
        """Queue an event of a station on this host. A `Wake` costs a serving half nothing."""
        if self._beside and type(event) is Wake:
            for command in self._decide(event):
                self._send(command)
            return
        name = host or "main" if self._beside and type(event) in SERVING else ""
        thread = self.threads.setdefault(name, CpuThread())
        thread.waiting.append((self._clock.now, event))
        if not thread.at_work:
            self._begin(thread)

    @property
    def occupied(self) -> bool:
        """Whether the main thread has queued events, which precede a passed deadline."""
        return self.main.at_work

    def _begin(self, thread: CpuThread) -> None:
        came, event = thread.waiting.popleft()
        thread.at_work = True
        self.waited += self._clock.now - came
        commands = self._decide(event)
        seconds = self._cost.draw(self._rng, len(commands))
        thread.busy_s += seconds
        thread.events += 1
        end = self._clock.now + seconds
        for command in commands:
            station = self._address(command)
            due = self._due[station] = max(end, self._due.get(station, 0.0))
            self._clock.at(due, self._send, command)
        self._clock.at(end, self._end, thread)

    def _end(self, thread: CpuThread) -> None:
        thread.at_work = False
        if thread.waiting:
            self._begin(thread)

    def summary(self) -> dict[str, object]:
        """share: busy share of the main thread; halves_share: of the busiest serving half; wait_s: mean
        queueing time of an event."""
        now = self._clock.now or 1.0
        halves = [thread for name, thread in self.threads.items() if name]
        heard = sum(thread.events for thread in self.threads.values())
        return {
            "share": self.main.busy_s / now,
            "events": self.main.events,
            "wait_s": self.waited / max(1, heard),
            "halves": len(halves),
            "halves_share": max((thread.busy_s for thread in halves), default=0.0) / now,
        }
