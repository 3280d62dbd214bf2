"""The processes of a run: starts, watches, kills and replaces the incarnations of its stations.

`Incarnation` decides, without I/O; the supervisor gives it facts and takes the steps. `look` never waits: events of
other stations are received in between.

Invariant: what an earlier incarnation sends is refused as soon as its successor may start.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec import structs

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import Joining, Resources, StationList, pack
from polyrhythm.runtime.hosts import MAIN, SAME, ClockOffset, Hosts, SpanAlignment
from polyrhythm.runtime.messages import Joined, process_address, rank_name
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.incarnation import AWAITING, FailureTracker, Incarnation, Rank, SupervisionLimits
from polyrhythm.runtime.processes.start import ProcessHandle, Spawn
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Outbox, Sockets
from polyrhythm.scheduler import records

log = logging.getLogger(__name__)

#: How long stations are given to leave by themselves, and when those that have not are named.
_LEAVE_S, _NAMED_S = 5.0, 1.0
#: Seconds that the kernel may take to end killed processes.
_REAP_S = 10.0
#: Seconds between two times that a process of an earlier incarnation is told to leave, and that a telling may take.
_DISMISS_S = 1.0
#: The most seconds between two looks at the inbox that count; and while a station is being replaced, when main looks
#: more often.
_LONGEST_S, _LONGEST_STEP_S = 1.0, 0.1
#: How much of a station's log is shown when it ends badly.
_LAST_LINES, _LAST_BYTES = 12, 16_384


@dataclass(slots=True, eq=False)
class Process:
    """A started process of a rank. host: where it works, "" if the run has one host; known: hosts that its spec names;
    endpoint, addresses: its inbox and parts, once it is ready; outbox: the line to it, while it is ready and
    has not been killed."""

    name: str
    rank: Rank
    handle: ProcessHandle
    log_file: Path
    host: str = ""
    known: Collection[str] = ()
    endpoint: str = ""
    addresses: tuple[str, ...] = ()
    outbox: Outbox | None = None

    def send(self, message: wire.Message, part: int = 0) -> None:
        """Send to one of its parts, in their order."""
        assert self.outbox is not None, f"{self.name} is not ready"
        self.outbox.send(wire.frame([(part, wire.encode(message))]))

    def send_all(self, message: wire.Message) -> None:
        """Send to all of its parts, if it is ready."""
        if self.outbox is not None:
            content = wire.encode(message)
            self.outbox.send(wire.frame([(part, content) for part in range(len(self.addresses))]))

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False if it has not in time."""
        try:
            self.handle.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill it, unless it has ended already, and close the line to it. Once it has been reaped it writes nowhere."""
        if self.outbox is not None:
            self.outbox.close()
            self.outbox = None
        if self.handle.poll() is None:
            self.handle.kill()


@dataclass(slots=True, eq=False)
class SupervisedStation:
    """A station and the processes of its present incarnation, by rank: a `StationView`. joined: its announcement, once
    a rank is ready; ready: all ranks are, and have not been killed; known: the incarnation whose announcement has been
    passed on, -1 while there is none; without_host: its incarnation is lost, and the next one has no host yet; past:
    counters of earlier incarnations; asked: the first heartbeat of each process that was asked for one since then, None
    before it."""

    name: str
    seats: Sequence[Resources]
    kind: str
    content: bytes
    run: Supervisor
    incarnation: Incarnation
    processes_by_rank: list[Process] = field(default_factory=list)
    joined: Joined | None = None
    ready: bool = False
    known: int = -1
    without_host: bool = False
    past: Counter[str] = field(default_factory=Counter)
    asked: dict[str, wire.Heartbeat | None] = field(default_factory=dict)

    @property
    def reachable(self) -> bool:
        """It is ready, and the announcement of this incarnation has been passed on."""
        return self.ready and self.known == self.incarnation.number

    @property
    def address(self) -> str:
        return process_address(self.name, self.incarnation.number)

    @property
    def host(self) -> str:
        return self.processes_by_rank[0].host if len(self.run.known_hosts) > 1 else ""

    @property
    def clock(self) -> ClockOffset | None:
        return self.run.alignment.used.get(self.host)

    @property
    def processes(self) -> Mapping[str, int]:
        return {process.name: process.handle.pid for process in self.processes_by_rank}

    def current_call(self) -> str:
        return self.incarnation.current_call(time.monotonic())

    def pending_work(self) -> Sequence[str]:
        answers = (
            beat.pending_work or () if beat is not None else (f"{name} does not answer",)
            for name, beat in self.asked.items()
        )
        return list(dict.fromkeys(line for lines in answers for line in lines))

    def statistics(self) -> dict[str, float]:
        return dict(self.past + (Counter() if self.incarnation.state == "gone" else self.incarnation.statistics()))

    def send(self, message: wire.Message, part: int = 0) -> None:
        """Send to one part of every rank."""
        for process in self.processes_by_rank:
            process.send(message, part)

    def send_all(self, message: wire.Message) -> None:
        """Send to all parts of every rank that is ready."""
        for process in self.processes_by_rank:
            process.send_all(message)

    def kill(self) -> None:
        """Kill every process that has not ended, and close the lines to them, without waiting."""
        self.ready = False
        for process in self.processes_by_rank:
            process.kill()


class Supervisor:
    """Supervises the processes of `stations`. spec: what all of them get at their start; sockets: of main; hosts: of
    the run, where there are several; joining: the stations that somebody joins.

    stations: by name, in their order, from `start` on. progress: rises while a station works or is being started.
    updates: that the trainer has reported. known_hosts: those where a station was started. replacing: a station is
    suspect or dying.
    """

    def __init__(
        self,
        stations: StationList,
        spec: ChildSpec,
        sockets: Sockets,
        limits: SupervisionLimits,
        logs: Path,
        spawn: Spawn,
        hosts: Hosts | None,
        joining: Joining,
    ) -> None:
        self.stations: dict[str, SupervisedStation] = {}
        self.progress = self.updates = 0
        self.hosts, self.known_hosts = hosts, set[str]()
        self.alignment = SpanAlignment(hosts.offset_of if hosts is not None else lambda _: SAME)
        self._given, self._spec, self._sockets, self._limits = stations, spec, sockets, limits
        self._logs, self._spawn, self._joining = logs, spawn, joining
        self._failures = FailureTracker()
        self.replacing = self._tracing = self._work_asked = False
        self._parts: dict[str, int] = {}  # of slots
        self._listened, self._empty = time.monotonic(), -math.inf  # when the inbox was last looked at, and found empty
        self._earlier: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
        self._dismissed: dict[tuple[str, int], float] = {}

    @property
    def processes(self) -> dict[str, Process]:
        stations = list(self.stations.values())
        return {process.name: process for station in stations for process in station.processes_by_rank}

    def start(self, now: float) -> None:
        for factory, *seats in self._given:
            kind, content = pack(factory)
            station = SupervisedStation(factory.name, seats, kind, content, self, Incarnation(factory.name, -1, []))
            self._start_incarnation(station, now)
            self.stations[factory.name] = station  # whole: other threads ask which processes there are

    def _start_incarnation(self, station: SupervisedStation, now: float) -> None:
        """Start the next incarnation, all its ranks. RunHalted: the system cannot; then none of them is left."""
        number, processes = station.incarnation.number + 1, list[Process]()
        try:
            for spec in self._specs(station, number):
                host = spec.host.own if spec.host is not None and len(self.known_hosts) > 1 else ""
                file = log_file(self._logs, station.name, number, spec.rank, host)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("ab") as log_of_rank:  # a resumed run writes on
                    handle = self._spawn(spec, log_of_rank)
                rank = Rank(spec.rank, handle.pid, now, turns=self._stations_in(spec.resources.process))
                process = Process(rank_name(station.name, spec.rank), rank, handle, file)
                if spec.host is not None:
                    process.host, process.known = spec.host.own, spec.host.servers
                processes.append(process)
        except OSError as error:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait(_REAP_S)
            raise RunHalted(
                f"{station.name}: its process cannot be started ({error.strerror}); free memory, processes (ulimit -u) "
                f"or room in {self._logs}, then start again with resume"
            ) from error
        far = self.hosts is not None and any(process.host != MAIN for process in processes)
        station.incarnation = Incarnation(station.name, number, [process.rank for process in processes], far)
        station.joined, station.processes_by_rank, station.without_host = None, processes, False
        self._link_beside(station)

    def _stations_in(self, process: str) -> int:
        return sum(seats[0].process == process for _, *seats in self._given) if process else 1

    def _link_beside(self, station: SupervisedStation) -> None:
        """Stations of one process, of which the last is started now, know each other."""
        process = station.seats[0].process
        for other in self.stations.values() if process else ():
            if other is not station and other.seats[0].process == process and other.incarnation.state == "starting":
                other.incarnation.beside.append(station.incarnation)
                station.incarnation.beside.append(other.incarnation)

    def _specs(self, station: SupervisedStation, number: int) -> Iterator[ChildSpec]:
        for rank, resources in enumerate(station.seats):
            view = self.hosts.view(rank_name(station.name, rank)) if self.hosts is not None else None
            if view is not None:
                self.known_hosts.update(view.servers)
            yield replace(
                self._spec,
                station=station.name,
                incarnation=number,
                kind=station.kind,
                content=station.content,
                resources=resources,
                folder=view.folder if view is not None else self._spec.folder,
                rank=rank,
                ranks=len(station.seats),
                host=view,
            )

    @property
    def complete(self) -> bool:
        """Every station is ready that has a place; of those that are joined, as many as are needed, and the others can
        be."""
        without_room = set(self.hosts.waiting) if self.hosts is not None else set()
        stations = [station for name, station in self.stations.items() if name not in without_room]
        waiting = sum(station.without_host or not station.incarnation.announced for station in stations)
        return waiting == sum(station.incarnation.awaits for station in stations) and not self.missing

    @property
    def missing(self) -> int:
        names = self._joining.stations & self.stations.keys()
        return max(0, self._joining.needed - sum(self.stations[name].incarnation.announced for name in names))

    def on_ready(self, hello: wire.Hello, joined: Joined, now: float) -> None:
        """A rank of a station is ready: know its inbox, and once all ranks are ready, the station."""
        station = self.stations[hello.station]
        process = station.processes_by_rank[hello.rank]
        process.endpoint, process.addresses = hello.endpoint, hello.addresses
        process.outbox = self._sockets.outbox(hello.endpoint)
        station.incarnation.announce(hello.rank)
        process.rank.pid = process.handle.pid
        process.rank.on_heartbeat(now, "", 0.0)
        station.joined = joined
        if self.hosts is not None:
            for host, endpoint in self.hosts.view(process.name).servers.items():
                if host not in process.known:
                    process.send(wire.HostAt(host, endpoint))
        if station.incarnation.announced:
            station.ready = True
            self._connect(station)

    def _connect(self, station: SupervisedStation) -> None:
        """Register a ready station's parts, and send generators the addresses of the slots of simulators."""
        first = station.processes_by_rank[0]
        if self._tracing:
            first.send_all(wire.MeasureSpans(True))  # before its first command
        if isinstance(station.joined, records.SimulatorJoined):
            for part, info in enumerate(station.joined.batches):
                self._parts |= {slot.slot: part for slot in info.slots}
            self._send_generators(self._connection(station))
        elif isinstance(station.joined, records.GeneratorJoined):
            for simulator in self._ready(records.SimulatorJoined):
                first.send(self._connection(simulator))

    def _connection(self, simulator: SupervisedStation) -> wire.Connect:
        """Where the replies for a simulator that is ready go, and where its requests lie."""
        endpoint, joined = simulator.processes_by_rank[0].endpoint, simulator.joined
        if self.hosts is None or not isinstance(joined, records.SimulatorJoined):
            return wire.Connect(simulator.address, endpoint)
        slots = tuple(slot.slot for info in joined.batches for slot in info.slots)
        return wire.Connect(simulator.address, endpoint, self.hosts.host_of(simulator.name), slots)

    def _ready(self, kind: type) -> list[SupervisedStation]:
        return [station for station in self.stations.values() if station.ready and isinstance(station.joined, kind)]

    def _send_generators(self, message: wire.Connect) -> None:
        for generator in self._ready(records.GeneratorJoined):
            generator.processes_by_rank[0].send(message)

    # ------------------------------------------------------------ supervision

    def listen(self, now: float) -> None:
        """Main looks at its inbox now; called before it handles what came. Time since the last look that is more than
        the usual counts for nobody."""
        pause = now - self._listened - (_LONGEST_STEP_S if self.replacing else _LONGEST_S)
        self._listened = now
        if pause > 0:
            for station in self.stations.values():
                station.incarnation.pause(pause)

    def on_empty_inbox(self, now: float) -> None:
        """Everything that had arrived by now has been received."""
        self._empty = now

    def look(self, now: float, emit: Callable[[records.StationLost], None]) -> None:
        """Take all steps that are due; emit the losses of stations. RunHalted: failures end the run, or a killed
        process does not end."""
        self.progress += not self.complete
        lost = [station for station in self.stations.values() if self._advance(station, now)]
        self.replacing = any(one.incarnation.state in ("suspect", "dying") for one in self.stations.values())
        for station in lost:
            station.past.update(station.incarnation.statistics())
        halts = [self._lose(station, now, emit) for station in lost]
        for halted in halts:
            if halted is not None:
                raise halted
        for station in lost:
            if self.hosts is None:
                self._start_incarnation(station, now)
                continue
            ends = ((process.endpoint, len(process.addresses)) for process in station.processes_by_rank)
            self._earlier[station.name, station.incarnation.number] = tuple(end for end in ends if end[0])
            station.without_host = True
            self.hosts.on_station_ended(station.name, now)
        if self.hosts is not None:
            self._look_at_hosts(self.hosts, now)

    def _advance(self, station: SupervisedStation, now: float) -> bool:
        incarnation = station.incarnation
        if incarnation.state == "gone":
            return False
        for process in station.processes_by_rank:
            process.rank.status = process.handle.poll()
        step = incarnation.advance(now, self._empty, self._limits)
        if step == "kill":
            station.kill()
            if isinstance(station.joined, records.SimulatorJoined):
                self._send_generators(wire.Connect(station.address, ""))
            step = incarnation.advance(now, self._empty, self._limits)
        return step == "lost"

    def _lose(
        self, station: SupervisedStation, now: float, emit: Callable[[records.StationLost], None]
    ) -> RunHalted | None:
        """Report a lost station; returns the error that ends the run, if one follows."""
        name, incarnation = station.name, station.incarnation
        reason, departed, leaves = incarnation.reason, incarnation.departed, incarnation.leaves
        outcome = self._restart_or_halt(station, now)
        if incarnation.announced:
            blame = departed.blame if departed is not None else leaves is None and not incarnation.follows
            emit(records.StationLost(name, incarnation.number, reason, blame, incarnation.moves))
        if isinstance(outcome, RunHalted):
            if not incarnation.fatal:  # else the station's own error says it all
                self._log_failure(station, "the run ends")
            return outcome
        if departed is not None:
            log.warning("the simulator that had joined as %s %s; %s", name, reason, outcome)
        elif leaves is not None or incarnation.follows:
            log.warning("%s %s; %s", name, reason, outcome)
        else:
            self._log_failure(station, outcome)
        return None

    def _restart_or_halt(self, station: SupervisedStation, now: float) -> str | RunHalted:
        """What follows the loss of a station: another start, in words, or the end of the run."""
        name, incarnation, reason = station.name, station.incarnation, station.incarnation.reason
        if incarnation.departed is not None:
            return "its place is open again"
        if incarnation.moves:
            return "nothing is wrong with it"
        if incarnation.follows:
            return "both are started again"
        if incarnation.fatal:
            return RunHalted(f"{name}: {reason}", name, reason)
        self._failures.count(incarnation.failure(self.updates), now, self._limits)
        verdict = self._failures.verdict(name, self._limits)
        if verdict:
            file = self._culprit(station).log_file
            return RunHalted(f"{verdict}; the last: {name} {reason}; its log: {file}", name, reason)
        return (
            f"starting it again (failure {self._failures.recent} of {self._limits.max_failures} that "
            "supervision.max_failures allows)"
        )

    def _log_failure(self, station: SupervisedStation, consequence: str) -> None:
        with self._culprit(station).log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode("utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        log.error("%s %s; %s%s", station.name, station.incarnation.reason, consequence, "\n".join(["", *lines]))

    def _culprit(self, station: SupervisedStation) -> Process:
        culprit = station.incarnation.culprit
        return station.processes_by_rank[culprit.number if culprit is not None else 0]

    def _look_at_hosts(self, hosts: Hosts, now: float) -> None:
        """Tell of hosts that came, have stations leave those that are lost, and start those that have a place now.
        RunHalted: the trainer's host is lost."""
        since = now - self._limits.heartbeat_s
        there = [station for station in self.stations.values() if not station.without_host]
        processes = [process for station in there for process in station.processes_by_rank]
        heard = {process.name for process in processes if process.rank.heard >= since}
        starting = any(station.incarnation.is_starting for station in self.stations.values())
        came, leaving, placed = hosts.advance(now, heard, starting=starting)
        for host, endpoint in came:
            for process in self.processes.values():
                if process.outbox is not None:
                    process.send(wire.HostAt(host, endpoint))
        for name, why in leaving.items():
            incarnation = self.stations[name].incarnation
            incarnation.leaves = incarnation.leaves or why
        for name in placed:
            self._start_incarnation(self.stations[name], now)

    def close(self) -> None:
        """Let all stations leave, and end those that do not; a second signal meanwhile ends them at once."""
        for process in self.processes.values():
            if process.rank.present and process.handle.poll() is None:
                process.send_all(wire.Stop())
        try:
            begin, present = time.monotonic(), [process for process in self.processes.values() if process.rank.present]
            if slow := [process for process in present if not process.wait(begin + _NAMED_S - time.monotonic())]:
                calls = [(process.name, process.rank.current_call(time.monotonic())) for process in slow]
                names = ", ".join(f"{name} ({call})" if call else name for name, call in calls)
                message = "waiting for %s to leave; killed after %g s, or at once by another signal"
                log.info(message, names, _LEAVE_S - _NAMED_S)
            for process in slow:
                process.wait(begin + _LEAVE_S - time.monotonic())
        finally:
            for station in self.stations.values():
                station.kill()
            until = time.monotonic() + _REAP_S
            stuck = [process for process in self.processes.values() if not process.wait(until - time.monotonic())]
        if stuck:
            names = ", ".join(f"{process.name} (process {process.handle.pid})" for process in stuck)
            raise RunHalted(f"{names}: not ended {_REAP_S:g} s after SIGKILL; check its device or file system")

    # ------------------------------------------------------------ messages to and from stations

    def check_sender(self, name: str, incarnation: int) -> None:
        """UnfitMessage unless this is the present incarnation of a station, and that is not lost."""
        station = self.stations.get(name)
        if station is None or incarnation > station.incarnation.number:
            raise UnfitMessage("unknown_station", f"it is signed by {name!r}, incarnation {incarnation}")
        if incarnation < station.incarnation.number or station.without_host:
            now = time.monotonic()
            if self.hosts is not None and now >= self._dismissed.get((name, incarnation), -math.inf) + _DISMISS_S:
                self._dismissed[name, incarnation] = now
                content = wire.encode(wire.Dismissed(name, incarnation))
                for endpoint, parts in self._earlier.get((name, incarnation), ()):  # given up on a node out of reach
                    outbox = self._sockets.outbox(endpoint)
                    outbox.send(wire.frame([(part, content) for part in range(parts)]))
                    outbox.close(_DISMISS_S)
            raise UnfitMessage("earlier_incarnation", f"{name} sent it in incarnation {incarnation}, which is lost")

    def send(self, station: str, message: wire.Message, slot: str = "") -> None:
        """Send to the station, to all its ranks, or to its part that has the slot; to all its parts what is about a
        device."""
        if isinstance(message, records.TakeDevice | records.YieldDevice):
            self.stations[station].send_all(message)
            return
        self.stations[station].send(message, self._parts[slot] if slot else 0)

    def on_heartbeat(self, beat: wire.Heartbeat, now: float) -> None:
        """A heartbeat of a present station. UnfitMessage: its numbers cannot be, or it has no such rank."""
        station = self.stations[beat.station]
        rank, name = station.incarnation.rank(beat.rank), rank_name(beat.station, beat.rank)
        lasted = 0 <= beat.for_s <= now - rank.began
        if not lasted or beat.units < 0 or not all(map(math.isfinite, beat.statistics.values())):
            raise UnfitMessage("impossible", f"a heartbeat of {name} with {beat.for_s} s and {beat.statistics}")
        before = rank.heartbeat
        if rank.present or beat.doing != AWAITING:
            self.progress += bool(beat.doing) or before is None or beat.units != before.units
            self.progress += not rank.present
        else:
            self.progress += bool(self.missing)  # else the run does not wait for this one
        rank.heartbeat = beat
        if name in station.asked and (beat.pending_work is not None or not self._work_asked):
            station.asked[name] = beat
        rank.on_heartbeat(now, beat.doing, beat.for_s, beat.place)

    def on_failed(self, failed: wire.Failed, now: float) -> None:
        """A rank says why it ends; its host's clock may be unknown. UnfitMessage: there is no such rank."""
        station = self.stations[failed.station]
        rank = station.incarnation.rank(failed.rank)
        host = station.processes_by_rank[failed.rank].host
        offset = SAME if self.hosts is None else self.hosts.offset_of(host)
        rank.failure = structs.replace(failed, at=now if offset is None else failed.at - offset.ahead_s)

    def set_tracing(self, on: bool) -> None:
        self._tracing = on
        for station in self.stations.values():
            station.processes_by_rank[0].send_all(wire.MeasureSpans(on))

    def ask(self, *, pending_work: bool) -> None:
        """Ask every process that is ready for its counters, and for its unfinished work if that is wanted."""
        self._work_asked = pending_work
        for station in self.stations.values():
            station.asked = {}
            if station.ready:
                station.asked = {process.name: None for process in station.processes_by_rank}
                station.send(wire.Ping(pending_work=pending_work))

    @property
    def all_answered(self) -> bool:
        return all(beat is not None for station in self.stations.values() for beat in station.asked.values())


def log_file(logs: Path, station: str, incarnation: int, rank: int = 0, host: str = "") -> Path:
    """Where a rank of an incarnation of a station writes what it logs. host: of the run's several, "" if it has one."""
    return logs / host / f"{process_address(station, incarnation, rank)}.log"


def find_log(logs: Path, station: str, incarnation: int) -> Path:
    """The log of rank 0 of an incarnation, on whichever host it is; the one last written to, if a part of the run
    before this one has had the same elsewhere."""
    own = log_file(logs, station, incarnation)
    found = [file for file in (own, *logs.glob(f"*/{own.name}")) if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=own)
