"""Drives a conductor on a virtual clock, with simulated stations instead of live ones.

    event ─▶ conductor.handle(event, now) ─▶ commands ─▶ stations ─▶ scheduled calls ─▶ event …

Consumes events in the order in which they reach the conductor; waits only for the clock; is unblocked by the next
scheduled call or the conductor's deadline, whichever is earlier (at the same instant the call goes first, so that a
request that arrives exactly when the batch clock ends still joins the batch).

Invariants: the same seed gives the same events, commands and times. If no call is scheduled, no deadline is set and
the goal is not reached, the run cannot continue: `Deadlock`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost
from polyrhythm.plugins.virtual.clustersim.hardware import Device, Network, VirtualClock
from polyrhythm.plugins.virtual.clustersim.measures import Measures
from polyrhythm.scheduler import records
from polyrhythm.scheduler.conductor import SERVING_EVENTS
from polyrhythm.scheduler.records import AbortStream, Command, Decision, Evaluate, EvaluationDone, Event, Halt, Request

#: Events at one instant after which the run counts as an endless loop.
INSTANT_LIMIT = 5_000_000
#: Wakes at one instant after which the conductor's deadline counts as stuck.
WAKE_LIMIT = 1_000
#: Messages that cross no link if serving is beside the generators.
_SERVING = SERVING_EVENTS | {records.Serve, records.StartStream, AbortStream, records.RefuseRequest}


class Decider(Protocol):
    """The part of the conductor's interface that a driver needs."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def deadline(self) -> float: ...


class DrivenStation(Protocol):
    """The part of a simulated station that the driver uses; see `VirtualStation`."""

    host: str
    cut: float
    last_sent: float
    last_told: float

    def handle(self, command: Command) -> None: ...


class RequestSender(DrivenStation, Protocol):
    """A simulated simulator, to which generators answer."""

    def taken(self, request: Request) -> None: ...

    def tokens(self, request: Request) -> list[int]: ...

    def answered(self, request: Request, version: int) -> None: ...

    def returned(self, request: Request) -> None: ...


class Deadlock(RuntimeError):
    """No call is scheduled and the goal is not reached."""


class ProtocolError(RuntimeError):
    """The conductor gave an invalid command."""


@dataclass(frozen=True, slots=True)
class Payload:
    """Metadata of a finished sample. success: of its episode; host: of its data."""

    ticket: int
    transitions: int
    chunk_steps: int
    oldest: int
    success: bool = False
    host: str = ""


class VirtualDriver:
    """The event loop of a simulation: a conductor, a clock, and the stations by name.

    message_delay: latency of a message between a station and the conductor; messages of one station keep their order,
    those of different stations may not. Replies bypass the conductor and are immediate on one host. network: between
    hosts, if simulated; cpu: cost of the conductor's events, if simulated; threads: devices whose work the conductor
    waits for. record: keep every decision in `steps` (for replay and benchmarks). observer: called with each decision.
    delivered: called with each event before its decision. bus: newest version available to generators, reported or not.
    evaluating: names of unfinished evaluations. scored: scorers determine how an episode ended.
    """

    def __init__(self, conductor: Decider, seed: int = 0, message_delay: Cost = FREE, record: bool = False) -> None:
        self.conductor, self.seed = conductor, seed
        self.clock = VirtualClock()
        self.measures = Measures()
        self.stations: dict[str, DrivenStation] = {}
        self.simulators: dict[str, RequestSender] = {}
        self.payloads: dict[str, Payload] = {}
        self.steps: list[Decision] = []
        self.observer: Callable[[float, Event, list[Command]], None] | None = None
        self.delivered: Callable[[Event], None] | None = None
        self.reached = self.bus = -1
        self.evaluating: set[str] = set()
        self.scored = False
        self.halted = ""
        self.events = 0
        self.network: Network | None = None
        self.cpu: ConductorCpu | None = None
        self.threads: tuple[Device, ...] = ()
        self._record, self._delay = record, message_delay
        self._direct = message_delay is FREE or message_delay.mean() == 0.0
        self._rng = random.Random(f"{seed}/messages")
        self._inbox: deque[Event] = deque()
        self._deadline = inf
        self._wakes = self._late = 0
        self._instant = (0.0, 0)

    def connect(self, network: Network) -> None:
        """Send all data between hosts over this network."""
        self.network, self._direct = network, False

    # ------------------------------------------------------------ messages

    def emit(self, station: DrivenStation, event: Event) -> None:
        """Send a station's event to the conductor."""
        if self._direct:
            self._inbox.append(event)
            return
        now = self.clock.now
        arrival = station.last_sent = max(now + self._delay_of(station, event), station.last_sent)
        self.clock.at(arrival, self._deliver, (station, now, event))

    def _deliver(self, message: tuple[DrivenStation, float, Event]) -> None:
        station, sent, event = message
        if sent <= station.cut:
            self._inbox.append(event)

    def _delay_of(self, station: DrivenStation, message: Event | Command) -> float:
        seconds = self._delay.draw(self._rng)
        if self.network is None or (self.cpu is not None and self.cpu.beside and type(message) in _SERVING):
            return seconds
        return seconds + self.network.delay(station.host, self.network.main)

    def submit(self, event: Event) -> None:
        """Deliver an event of the operator or of supervision to the conductor at once."""
        if isinstance(event, Evaluate):
            self.evaluating.add(event.name)
        self._inbox.append(event)

    def report(self, station: DrivenStation, event: Event) -> None:
        """Deliver supervision's event about a station after the station's own messages."""
        if station.last_sent <= self.clock.now:
            self._inbox.append(event)
        else:
            self.clock.at(station.last_sent, self._inbox.append, event)

    def reply(self, host: str, request: Request, version: int) -> None:
        """Deliver the answer of a generator on `host` directly to the slot, over the network if that is elsewhere."""
        seconds = self.network.delay(host, self.simulators[request.simulator].host) if self.network else 0.0
        if seconds:
            self.clock.after(seconds, self._reply, (request, version))
        else:
            self._reply((request, version))

    def _reply(self, answer: tuple[Request, int]) -> None:
        request, version = answer
        self.simulators[request.simulator].answered(request, version)

    # ------------------------------------------------------------ the loop

    def run(self, version: int, max_time: float = inf) -> None:
        """Run until `TargetReached(version)` and the end of every evaluation, or `Halt`, or `max_time`. Raises Deadlock
        if the run cannot continue, ProtocolError for an invalid command."""
        clock = self.clock
        self._drain()
        while (self.reached < version or self.evaluating) and not self.halted:
            upcoming = clock.upcoming
            # Queued events of the main thread precede a passed deadline.
            waits = self.cpu is not None and self.cpu.main.at_work
            due = inf if waits or any(thread.at_work for thread in self.threads) else self._deadline
            time = min(upcoming, due)
            if time == inf:
                raise Deadlock(
                    f"at {clock.now:g} s version {self.reached} of {version} is reached, evaluations under way are "
                    f"{sorted(self.evaluating)}, and nothing is planned"
                )
            if time > max_time:
                clock.now = max_time
                return
            if upcoming <= due:
                if self.threads:
                    self._advance_threads()
                else:
                    clock.advance()
            else:
                self._wake()
            if self._inbox:
                self._drain()

    def _advance_threads(self) -> None:
        """In one thread: wake the conductor once its time limit has passed and then a whole unit of work without an
        event."""
        before = sum(thread.ended for thread in self.threads)
        self.clock.advance()
        units = sum(thread.ended for thread in self.threads) - before
        if self._inbox or self._deadline >= self.clock.now:
            self._late = 0
        elif units:
            self._late += units
            if self._late > 1:
                self._late = 0
                self._inbox.append(records.Wake())

    def _wake(self) -> None:
        clock = self.clock
        if self._deadline > clock.now:
            clock.now = self._deadline
            self._wakes = 0
        self._wakes += 1
        if self._wakes > WAKE_LIMIT:
            raise ProtocolError(f"the conductor's deadline stays at {self._deadline:g} s however often it is woken")
        self._inbox.append(records.Wake())

    def _drain(self) -> None:
        inbox, now, count = self._inbox, self.clock.now, self.events
        while inbox and self.cpu is not None:
            event = inbox.popleft()
            station = self.stations.get(getattr(event, "simulator", "") or getattr(event, "generator", ""))
            self.cpu.receive(event, "" if station is None else station.host)
        if self.cpu is not None:
            return
        while inbox:
            event = inbox.popleft()
            commands = self._decide(event)
            for command in commands:
                self.send(command)
            if self.observer is not None:
                self.observer(now, event, commands)
        began, before = self._instant
        self._instant = (now, before + self.events - count if began == now else 0)
        if self._instant[1] > INSTANT_LIMIT:
            raise ProtocolError(f"more than {INSTANT_LIMIT} events at {now:g} s; the last was {event!r}")
        self._deadline = self.conductor.deadline()

    def _decide(self, event: Event) -> list[Command]:
        self.events += 1
        if self.delivered is not None:
            self.delivered(event)
        commands = self.conductor.handle(event, self.clock.now)
        if self._record:
            self.steps.append(Decision(self.clock.now, event, tuple(commands)))
        return commands

    def decide_for_cpu(self, event: Event) -> list[Command]:
        """The conductor's commands for the event; its CPU sends them when it is done."""
        commands = self._decide(event)
        if self.observer is not None:
            self.observer(self.clock.now, event, commands)
        self._deadline = self.conductor.deadline()
        return commands

    def send(self, command: Command) -> None:
        """Send a command to its station, or carry it out if it is the run's."""
        name = records.address_of(command)
        if not name:
            self._accept(command)
            return
        station = self.stations.get(name)
        if station is None:
            raise ProtocolError(f"{command!r} is addressed to {name!r}, which never joined")
        if self._direct:
            station.handle(command)
            return
        arrival = station.last_told = max(self.clock.now + self._delay_of(station, command), station.last_told)
        self.clock.at(arrival, station.handle, command)

    def _accept(self, command: Command) -> None:
        if isinstance(command, records.ReleasePayloads):
            for payload_id in command.payload_ids:
                if self.payloads.pop(payload_id, None) is None:
                    raise ProtocolError(f"payload {payload_id!r} is released twice, or never existed")
        elif isinstance(command, records.TargetReached):
            self.reached = max(self.reached, command.version)
        elif isinstance(command, EvaluationDone):
            self.evaluating.remove(command.name)
            self.measures.evaluated += command.finished
            self.measures.evaluations_dropped += command.dropped
        elif isinstance(command, Halt):
            self.halted = command.reason


@dataclass(slots=True)
class CpuThread:
    """A thread of the conductor. waiting: events with their arrival times."""

    waiting: deque[tuple[float, Event]] = field(default_factory=deque)
    at_work: bool = False
    busy_s: float = 0.0
    events: int = 0


class ConductorCpu:
    """CPU cost of the conductor: a thread handles one event at a time, and its commands are sent when it is done.

        event ─▶ queue of a thread ─▶ conductor.handle(event) ─▶ cost ─▶ commands are sent

    beside: a thread on each host handles the serving events. The decisions are still those of a single conductor with
    full knowledge: a serving half per host cannot decide better.

    cost: of an event, by the number of its commands.

    Invariants: a thread handles events in the order of arrival; commands reach a station in the order of decision.
    """

    def __init__(self, driver: VirtualDriver, cost: Cost, *, beside: bool) -> None:
        self.threads: dict[str, CpuThread] = {"": CpuThread()}
        self.waited = 0.0
        self.beside = beside
        self._driver, self._clock, self._cost = driver, driver.clock, cost
        self._due: dict[str, float] = {}
        self._rng = random.Random(f"{driver.seed}/conductor")

    @property
    def main(self) -> CpuThread:
        """The thread of tickets, samples and weights; of everything, unless serving is beside the generators."""
        return self.threads[""]

    def receive(self, event: Event, host: str) -> None:
        """Queue an event of a station on this host. A `Wake` costs a serving half nothing."""
        if self.beside and type(event) is records.Wake:
            for command in self._driver.decide_for_cpu(event):
                self._driver.send(command)
            return
        name = host or "main" if self.beside and type(event) in SERVING_EVENTS else ""
        thread = self.threads.setdefault(name, CpuThread())
        thread.waiting.append((self._clock.now, event))
        if not thread.at_work:
            self._begin(thread)

    def _begin(self, thread: CpuThread) -> None:
        came, event = thread.waiting.popleft()
        thread.at_work = True
        self.waited += self._clock.now - came
        commands = self._driver.decide_for_cpu(event)
        seconds = self._cost.draw(self._rng, len(commands))
        thread.busy_s += seconds
        thread.events += 1
        end = self._clock.now + seconds
        for command in commands:
            station = records.address_of(command)
            due = self._due[station] = max(end, self._due.get(station, 0.0))
            self._clock.at(due, self._driver.send, command)
        self._clock.at(end, self._end, thread)

    def _end(self, thread: CpuThread) -> None:
        thread.at_work = False
        if thread.waiting:
            self._begin(thread)

    def summary(self) -> dict[str, object]:
        """share: busy share of the main thread; halves_share: of the busiest half; wait_s: mean wait of an event."""
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
