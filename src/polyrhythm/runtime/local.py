"""Hosts each station in a process of its own on this machine (`launcher: local`), watched and replaced; a station of
several ranks in one process for each rank.

    main's inbox  ← events, reports, heartbeats of all stations
    each station's inbox ← commands from main, replies from generators; each names the part that it is for

A station of which a rank ends, falls silent, exceeds a deadline or refuses a command is killed and reaped, all its
ranks; what it had sent before is received, then `StationLost`; then the next incarnation starts. Other stations are
heard meanwhile.

A message that cannot be decoded, comes from nobody who is present, or answers nothing that was asked is dropped,
counted by kind, and warned about once. It ends neither the run nor a station.

Invariants: an event is passed on only if its station's present incarnation sent it; a command reaches only the
incarnation that the conductor knows; `StationLost` comes when all its processes have been reaped.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from polyrhythm.env_warnings import warn_once
from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList
from polyrhythm.runtime.hosting import StationView
from polyrhythm.runtime.hosts import Hosts
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import ORDERS, Event, Joined, Order, Report, Spans, WorkerJoined, rank_name, sender_of
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.incarnation import RECONNECTING, SupervisionLimits
from polyrhythm.runtime.processes.start import Spawn, start_child
from polyrhythm.runtime.processes.supervisor import Supervisor
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.runtime.transport.drops import DROPPED, DropCounter, UnfitMessage
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets, Transport
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: Seconds between two looks at the processes and their deadlines.
_LOOK_S = 0.25
#: The same while a station is being replaced.
_STEP_S = 0.02
#: How long stations are waited for that were asked for their counters.
_ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Memory that the processes of a run share. in_flight: what they have been told, with the arena's layout; weights:
    layout of the published weights; folder: of the run, with its memory and its sockets."""

    in_flight: InFlight
    weights: WeightsLayout
    folder: Path


@dataclass(frozen=True, slots=True)
class RunSockets:
    """Sockets of a run. address: of this machine for its other hosts; keys: of the run, if its hosts have them."""

    transport: Transport = "ipc"
    address: str = LOOPBACK
    keys: RunKeys | None = None


_IPC = RunSockets()


class LocalHosting:
    """Hosts `stations`, each in a process of its own. spawn: starts a process; hosts: of the run, where there are
    several; joining: the stations that somebody joins.

    StartError: an address is taken, or strangers could not be kept out; then nothing has been started.
    """

    def __init__(
        self,
        stations: StationList,
        memory: RunMemory,
        limits: SupervisionLimits,
        logs: Path,
        *,
        network: RunSockets = _IPC,
        spawn: Spawn = start_child,
        hosts: Hosts | None = None,
        joining: Joining = NOBODY_JOINS,
    ) -> None:
        transport, keys, folder = network.transport, network.keys, str(memory.folder)
        if keys is None and transport == "tcp":
            keys = make_keys()
        self._hosts, self._drops, self._in_flight = hosts, DropCounter("main"), memory.in_flight
        self._warned_drops: set[tuple[str, str]] = set()
        self._broken: set[str] = set()  # stations whose joined simulator is not heard
        self._joinable = joining.stations
        with ExitStack() as undo:
            self._sockets = Sockets(
                transport, folder, keys, self._drops.stranger, wire.LARGEST, address=network.address
            )
            undo.callback(self._sockets.close)
            self._inbox = self._sockets.inbox("main")
            undo.pop_all()
        spec = ChildSpec(
            layout=memory.in_flight.layout,
            weights=memory.weights,
            folder=folder,
            main=self._inbox.endpoint,
            transport=transport,
            keys=keys,
            parent=os.getpid(),
            start_s=limits.start_s,
        )
        self._supervisor = Supervisor(stations, spec, self._sockets, limits, logs, spawn, hosts, joining)
        self._events: deque[Event] = deque()
        self._reports: list[Report] = []
        self._spans: list[Spans] = []
        self._looked = time.monotonic()
        self._woken = False

    def start(self) -> list[Joined]:
        """As in `Hosting`. Stations that are joined are waited for if they are needed. RunHalted: one of the others
        cannot be started, or a `waker` ended it."""
        self._supervisor.start(time.monotonic())
        while not self._supervisor.complete:
            self._wait(_LOOK_S)
            if self._woken:
                raise RunHalted("the start was interrupted")
        self._events.clear()
        ready = [station for station in self._supervisor.stations.values() if station.incarnation.announced]
        for station in ready:
            station.known = station.incarnation.number
        return [self._with_host(station.joined) for station in ready if station.joined is not None]

    @property
    def names(self) -> Sequence[str]:
        return list(self._supervisor.stations)

    @property
    def work_done(self) -> int:
        return self._supervisor.progress

    @property
    def drops(self) -> Mapping[str, int]:
        return self._drops.counts()

    def station(self, name: str) -> StationView:
        return self._supervisor.stations[name]

    def send(self, station: str, command: Order, slot: str = "") -> None:
        if self._supervisor.stations[station].reachable:
            self._in_flight.on_command(command)
            self._supervisor.send(station, command, slot)

    # ------------------------------------------------------------ what comes in

    def receive(self, timeout: float) -> Event | None:
        """As in `Hosting`.

        Consumes: messages to main, ends of processes. Waits for: either, or the next deadline of a station.
        Unblocked by: these, or a `waker`, which ends it without an event. Produces: an event. RunHalted: failures end
        the run.
        """
        until = time.monotonic() + timeout
        while not self._events and not self._woken:
            rest = until - time.monotonic()
            heard = self._wait(min(max(rest, 0.0), _LOOK_S))
            if rest <= 0 and not heard:
                break
        self._woken = False
        if not self._events:
            return None
        event = self._events.popleft()  # the conductor is about to know it
        if isinstance(event, records.StationLost):
            self._supervisor.stations[event.station].known = -1
        elif isinstance(event, Joined):
            name, incarnation = sender_of(event) or ("", 0)
            self._supervisor.stations[name].known = incarnation
        return event

    def waker(self) -> Callable[[], None]:
        """What other threads call to end the `receive` or `start` that waits, or the next one that would."""
        outbox, message = self._sockets.outbox(self._inbox.endpoint), wire.encode(wire.WakeUp())
        return lambda: outbox.send(message)

    def _wait(self, seconds: float) -> bool:
        """Receive what has come, or wait for it; look after the stations now and then. True if something came.

        While a station is being replaced, all that has come is received at once, so that its last word is known.
        """
        replacing = self._supervisor.replacing
        look_s = _STEP_S if replacing else _LOOK_S
        content = self._inbox.receive(min(seconds, look_s))
        now = time.monotonic()
        self._supervisor.listen(now)
        heard = content is not None
        while content is not None:
            self._receive_frame(content)
            if not replacing or time.monotonic() >= now + _LOOK_S:
                break
            content = self._inbox.receive()
        if content is None:
            self._supervisor.on_empty_inbox(now)
        if now >= self._looked + look_s:
            self._looked = now
            self._supervisor.look(now, self._events.append)
        return heard

    def _receive_frame(self, content: bytes) -> None:
        """Decode a frame; drop messages that are not from a present station, or cannot be true."""
        try:
            messages = wire.unframe(content)
        except UnfitMessage as unfit:
            self._drops.drop(unfit.kind, str(unfit))
            return
        for _, encoded in messages:
            try:
                message = wire.decode(encoded)
                if isinstance(message, wire.WakeUp):
                    self._woken = True
                else:
                    self._accept(message)
            except UnfitMessage as unfit:
                self._drops.drop(unfit.kind, str(unfit))

    def _accept(self, message: object) -> None:
        """Take one message. UnfitMessage: it cannot be true; then nothing has changed."""
        sender = sender_of(message)
        if sender is None:
            raise UnfitMessage("misdirected", f"{type(message).__name__} is not for the main process")
        self._supervisor.check_sender(*sender)
        match message:
            case records.RequestArrived() | records.BatchDone() | records.StreamDone():  # first: the most frequent
                self._in_flight.accept(message)
                self._events.append(message)
            case wire.Heartbeat():
                self._supervisor.on_heartbeat(message, time.monotonic())
                self._log_changes(message)
            case wire.Hello():
                self._on_hello(message)
            case wire.Failed():
                self._supervisor.on_failed(message, time.monotonic())
            case wire.Refused():
                self._on_refused(message)
            case wire.Warned(text=text):
                warn_once(text)
            case Report():
                self._in_flight.check_report(message)
                self._reports.append(message)
            case Spans(station=station):
                host = self._supervisor.stations[station].processes_by_rank[0].host
                spans, uncertainty_s = self._supervisor.alignment.align(message, host)
                self._in_flight.check_spans(spans, time.monotonic(), uncertainty_s)
                self._spans.append(spans)
            case _:
                self._in_flight.accept(message)
                self._supervisor.updates += isinstance(message, records.UpdateDone)
                self._events.append(message)  # type: ignore[arg-type]

    def _on_hello(self, hello: wire.Hello) -> None:
        """A rank of a station is ready. UnfitMessage: it was ready already, or its announcement cannot be true."""
        station = self._supervisor.stations[hello.station]
        if not station.incarnation.alive:
            return  # it came too late, its successor is about to start
        joined = wire.decode(hello.joined)
        if not isinstance(joined, Joined) or sender_of(joined) != (hello.station, hello.incarnation):
            raise UnfitMessage("impossible", f"{hello.station} greets with the announcement {joined}")
        rank, name = station.incarnation.rank(hello.rank), rank_name(hello.station, hello.rank)
        if rank.present or not self._sockets.could_be(hello.endpoint):
            raise UnfitMessage("impossible", f"{name} greets again, or from elsewhere: {hello.endpoint}")
        if station.joined not in (None, joined):
            raise UnfitMessage("impossible", f"{name} announces {joined}, other ranks something else")
        complete = all(other.present for other in station.incarnation.ranks if other is not rank)
        if complete:
            self._in_flight.join(joined, hello.addresses)
        self._supervisor.on_ready(hello, joined, time.monotonic())
        if complete:
            self._events.append(self._with_host(joined))
            if hello.station in self._joinable:
                log.info("a simulator has joined as %s", hello.station)

    def _with_host(self, joined: Joined) -> Joined:
        if self._hosts is None or isinstance(joined, records.TrainerJoined | WorkerJoined):
            return joined
        name, _ = sender_of(joined) or ("", 0)
        return replace(joined, host=self._hosts.host_of(name))

    def _log_changes(self, beat: wire.Heartbeat) -> None:
        """Warn once for each process and kind of message that it drops, its own log has each; and say once that a
        joined simulator is not heard, and that it is heard again."""
        process = rank_name(beat.station, beat.rank)
        for name in beat.statistics:
            if name.startswith(DROPPED) and (process, name) not in self._warned_drops:
                self._warned_drops.add((process, name))
                file = self._supervisor.processes[process].log_file
                kind = name.removeprefix(DROPPED)
                what = "somebody who wants to join is refused" if kind == "refused" else f"dropped a message ({kind})"
                log.warning("%s: %s; its log says why: %s", process, what, file)
        broken = beat.doing == RECONNECTING
        if broken == (beat.station in self._broken):
            return
        if broken:
            self._broken.add(beat.station)
            log.warning(
                "%s: its connection is silent; the run waits for its episodes for join.reconnect_s at most, then they "
                "run again elsewhere",
                beat.station,
            )
        else:
            self._broken.discard(beat.station)
            if self._supervisor.stations[beat.station].incarnation.announced:
                log.info("%s: its connection is back", beat.station)

    def _on_refused(self, refused: wire.Refused) -> None:
        """A station cannot obey a command: it is replaced if main did send it. UnfitMessage: main did not."""
        command = wire.decode(refused.command)
        if not isinstance(command, ORDERS) or not self._in_flight.is_due(command):
            raise UnfitMessage("impossible", f"{refused.station} refuses {command}, which nobody has sent")
        rank = self._supervisor.stations[refused.station].incarnation.rank(refused.rank)
        rank.refusal = f"refused {type(command).__name__}: {refused.why}"

    def reports(self) -> list[Report]:
        reports, self._reports = self._reports, []
        return reports

    def set_tracing(self, on: bool) -> None:
        self._supervisor.set_tracing(on)

    def spans(self) -> list[Spans]:
        spans, self._spans = self._spans, []
        return spans

    def statistics(self, *, fresh: bool = False, pending_work: bool = False) -> dict[str, dict[str, float]]:
        if fresh:
            self._supervisor.ask(pending_work=pending_work)
            until = time.monotonic() + _ANSWER_S
            while not self._supervisor.all_answered and time.monotonic() < until:
                self._wait(_LOOK_S)
        return {name: station.statistics() for name, station in self._supervisor.stations.items()}

    def close(self) -> None:
        if self._sockets.closed:
            return
        try:
            self._supervisor.close()
        finally:
            self._inbox.close()
            self._sockets.close()
