"""The processes of a run: each station's present incarnation, how it is reached, and what earlier ones had done."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.factories import NOBODY_JOINS, Joining, StationList, pack
from polyrhythm.runtime.hosts import MAIN, Hosts
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Joined, process_address
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import ChildProcess, Spawn, start_child
from polyrhythm.runtime.processes.rank_group import RankGroup
from polyrhythm.runtime.processes.supervision import AWAITING, FailureTracker, SupervisionLimits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

#: How long stations are given to leave by themselves, and when those that have not are named.
_LEAVE_S, _NAMED_S = 5.0, 1.0
#: Seconds that the kernel may take to end killed processes.
_REAP_S = 10.0
#: Seconds between two times that a process of an earlier incarnation is told to leave, and that a telling may take.
_DISMISS_S = 1.0


class ProcessManager:
    """Keeps the processes of `stations`, by station in their order. main: the endpoint of main's inbox.

    hosts: of the run, where there are several; joining: the stations that somebody joins. groups: each station's
    present incarnation. progress: rises while a station works or is being started. updates: that the trainer has
    reported.
    """

    def __init__(  # noqa: PLR0913 - what every process is told
        self,
        stations: StationList,
        layout: ArenaLayout,
        weights: WeightsLayout,
        sockets: Sockets,
        *,
        main: str,
        limits: SupervisionLimits,
        logs: Path,
        spawn: Spawn = start_child,
        hosts: Hosts | None = None,
        joining: Joining = NOBODY_JOINS,
    ) -> None:
        self.groups: dict[str, RankGroup] = {}
        self.progress = self.updates = 0
        self._stations = {factory.name: (factory, seats) for factory, *seats in stations}
        self._layout, self._weights, self._sockets, self._main = layout, weights, sockets, main
        self._limits, self._logs, self._spawn_child, self._hosts = limits, logs, spawn, hosts
        self._joining = joining
        self._failures = FailureTracker()
        self._measuring = False
        self._parts: dict[str, int] = {}
        self._asked: list[str] = []
        self._pending_work: dict[str, tuple[str, ...]] = {}
        self._seeking: set[str] = set()
        self._known_hosts: set[str] = set()
        self._earlier: dict[tuple[str, int], tuple[tuple[str, int], ...]] = {}
        self._dismissed: dict[tuple[str, int], float] = {}
        self._past: dict[str, Counter[str]] = {name: Counter() for name in self._stations}

    @property
    def processes(self) -> dict[str, ChildProcess]:
        """The processes of all stations, by name."""
        return {process.name: process for group in self.groups.values() for process in group}

    # ------------------------------------------------------------ come and go

    def start(self, now: float) -> None:
        """Start the first incarnation of every station."""
        for name in self._stations:
            self._spawn(name, 0, now)

    def _spawn(self, name: str, incarnation: int, now: float) -> None:
        """Start an incarnation of a station, all its ranks. RunHalted: the system cannot; then none of them is left."""
        group = RankGroup(name, incarnation, self._hosts.view(name).servers if self._hosts is not None else ())
        try:
            for spec in self._specs(name, incarnation):
                file = log_file(self._logs, name, incarnation, spec.rank, self._log_host(spec))
                file.parent.mkdir(parents=True, exist_ok=True)
                group.processes.append(ChildProcess(spec, file, now, self._spawn_child))
        except OSError as error:
            group.kill()
            for process in group:
                process.wait(_REAP_S)
            raise RunHalted(
                f"{name}: its process cannot be started ({error.strerror}); free memory, processes (ulimit -u) or room "
                f"in {self._logs}, then start again with resume"
            ) from error
        self.groups[name] = group  # whole: other threads ask which processes there are

    def _log_host(self, spec: ChildSpec) -> str:
        """The host by which its log is named, "" if the run has one host."""
        if spec.host is None:
            return ""
        self._known_hosts.update(spec.host.servers)
        return spec.host.own if len(self._known_hosts) > 1 else ""

    def _specs(self, name: str, incarnation: int) -> Iterator[ChildSpec]:
        """What the processes of an incarnation get at their start, by rank."""
        factory, seats = self._stations[name]
        kind, content = pack(factory)
        view = self._hosts.view(name) if self._hosts is not None else None
        for rank, resources in enumerate(seats):
            yield ChildSpec(
                station=name,
                incarnation=incarnation,
                kind=kind,
                content=content,
                resources=resources,
                layout=self._layout,
                weights=self._weights,
                folder=view.folder if view is not None else self._sockets.folder,
                main=self._main,
                transport=self._sockets.transport,
                keys=self._sockets.keys,
                parent=os.getpid(),
                rank=rank,
                ranks=len(seats),
                host=view,
            )

    @property
    def complete(self) -> bool:
        """Every station is ready that has a place; of those that are joined, as many as are needed, and the others can
        be."""
        without_room = set(self._hosts.waiting) if self._hosts is not None else set()
        groups = [group for name, group in self.groups.items() if name not in without_room]
        waiting = sum(not group.present or group.station in self._seeking for group in groups)
        open_ = sum(group.awaits for group in groups)
        return waiting == open_ and not self.missing

    @property
    def missing(self) -> int:
        """How many have yet to join before the run has what it needs."""
        joined = sum(self.groups[name].present for name in self._joining.stations if name in self.groups)
        return max(0, self._joining.needed - joined)

    def welcome(self, hello: wire.Hello, joined: Joined, now: float) -> None:
        """A rank of a station is ready: know its inbox, and once all ranks are ready, the station."""
        group = self.groups[hello.station]
        process = group.rank(hello.rank)
        process.greet(self._sockets, hello, joined)
        process.monitor.note_heartbeat(now, "", 0.0)
        if self._hosts is not None:
            for host, endpoint in self._hosts.view(hello.station).servers.items():
                if host not in group.hosts:
                    process.tell(wire.HostAt(host, endpoint))
        if group.present:
            self._welcome_station(group.first)

    def _welcome_station(self, process: ChildProcess) -> None:
        """Know its parts and tell the generators where its slots are. process: its rank 0."""
        joined = process.joined
        if self._measuring:
            process.tell_all(wire.MeasureSpans(True))  # before its first command
        if isinstance(joined, records.SimulatorJoined):
            for part, info in enumerate(joined.batches):
                self._parts |= {slot.slot: part for slot in info.slots}
            self._tell_generators(self._connection(process))
        elif isinstance(joined, records.GeneratorJoined):
            for simulator in self._present(records.SimulatorJoined):
                process.tell(self._connection(simulator))

    def _connection(self, simulator: ChildProcess) -> wire.Connect:
        """Where the replies for a simulator that is ready go, and where its requests lie."""
        joined, hosts = simulator.joined, self._hosts
        if hosts is None or not isinstance(joined, records.SimulatorJoined):
            return wire.Connect(simulator.address, simulator.endpoint)
        slots = tuple(slot.slot for info in joined.batches for slot in info.slots)
        return wire.Connect(simulator.address, simulator.endpoint, hosts.host_of(simulator.station), slots)

    def _present(self, kind: type) -> list[ChildProcess]:
        """The stations that announced themselves so and can be told something, by their rank 0."""
        return [g.first for g in self.groups.values() if g.reachable and isinstance(g.joined, kind)]

    def _tell_generators(self, message: wire.Connect) -> None:
        for generator in self._present(records.GeneratorJoined):
            generator.tell(message)

    def measure_spans(self, on: bool) -> None:
        """Have all stations, the later ones included, say what they do, or no longer."""
        self._measuring = on
        for group in self.groups.values():
            group.first.tell_all(wire.MeasureSpans(on))

    def suspects(self, now: float) -> list[RankGroup]:
        """The stations of which a process has ended or is to be given up."""
        groups = [group for name, group in self.groups.items() if name not in self._seeking]
        return [group for group in groups if group.is_suspect(now, self._limits)]

    def complaint(self, group: RankGroup, now: float) -> str:
        """What is wrong with it, in words; "" if nothing is."""
        return group.complaint(now, self._limits)

    def is_silent(self, group: RankGroup, now: float) -> bool:
        """Whether it is suspected for want of heartbeats alone."""
        return group.is_silent(now, self._limits)

    def is_far(self, group: RankGroup) -> bool:
        """Whether what it says comes from another host."""
        return self._hosts is not None and self._hosts.host_of(group.station) != MAIN

    def note_pause(self, seconds: float) -> None:
        """Main did not listen for so long."""
        for group in self.groups.values():
            group.note_pause(seconds)

    def dismiss(self, group: RankGroup) -> None:
        """Kill it and close all lines to it, without waiting: once it has exited it writes nowhere."""
        group.kill()
        if isinstance(group.joined, records.SimulatorJoined):
            self._tell_generators(wire.Connect(group.first.address, ""))

    def judge(self, group: RankGroup, reason: str, now: float) -> str | RunHalted:
        """What becomes of a station that was dismissed: another start, in words, or the end of the run."""
        name = group.station
        if group.departed is not None:
            return "its place is open again"
        if group.moves_for(reason):
            return "nothing is wrong with it"
        if group.fatal:
            return RunHalted(f"{name}: {reason}", name, reason)
        self._failures.count(group.failure(self.updates), now, self._limits)
        verdict = self._failures.verdict(name, self._limits)
        if verdict:
            file = (group.culprit or group.first).log_file
            return RunHalted(f"{verdict}; the last: {name} {reason}; its log: {file}", name, reason)
        return (
            f"starting it again (failure {self._failures.recent} of {self._limits.max_failures} that "
            "supervision.max_failures allows)"
        )

    def start_next(self, group: RankGroup, now: float) -> None:
        """Start the next incarnation of a station that is lost, or look for a place for it; nothing that it says from
        now on is accepted."""
        if self._hosts is None:
            self._succeed(group, now)
        else:
            ends = tuple((process.endpoint, len(process.addresses)) for process in group if process.endpoint)
            self._earlier[group.station, group.incarnation] = ends
            self._seeking.add(group.station)
            self._hosts.seek(group.station, now)

    def _succeed(self, group: RankGroup, now: float) -> None:
        self._past[group.station].update(group.statistics())
        self._spawn(group.station, group.incarnation + 1, now)

    def look_after_hosts(self, now: float) -> None:
        """Tell of hosts that came, have stations leave those that are lost, and start those that have a place now.
        RunHalted: the trainer's host is lost."""
        if self._hosts is None:
            return
        since = now - self._limits.heartbeat_s
        heard = {name for name, group in self.groups.items() if name not in self._seeking and group.was_heard(since)}
        starting = any(group.is_starting for group in self.groups.values())
        hosts, leaving, placed = self._hosts.advance(now, heard, starting=starting)
        for host, endpoint in hosts:
            for process in self.processes.values():
                if process.reachable:
                    process.tell(wire.HostAt(host, endpoint))
        for station, why in leaving.items():
            group = self.groups[station]
            group.leaves = group.leaves or why
        for station in placed:
            self._seeking.discard(station)
            self._succeed(self.groups[station], now)

    def close(self) -> None:
        """Let all stations leave, and end those that do not; a second signal meanwhile ends them at once."""
        for group in self.groups.values():
            group.stop()
        try:
            self._wait_for_leaving()
        finally:
            for group in self.groups.values():
                group.kill()
            until = time.monotonic() + _REAP_S
            stuck = [process for process in self.processes.values() if not process.wait(until - time.monotonic())]
        if stuck:
            names = ", ".join(f"{process.name} (process {process.pid})" for process in stuck)
            raise RunHalted(f"{names}: not ended {_REAP_S:g} s after SIGKILL; check its device or file system")

    def _wait_for_leaving(self) -> None:
        """Until all that were ready have left, or `_LEAVE_S` are over; those that take long are named."""
        begin = time.monotonic()
        waited = [process for process in self.processes.values() if process.monitor.present]
        slow = [process for process in waited if not process.wait(begin + _NAMED_S - time.monotonic())]
        if slow:
            names = ", ".join(_name_with_call(process, time.monotonic()) for process in slow)
            message = "waiting for %s to leave; killed after %g s, or at once by another signal"
            log.info(message, names, _LEAVE_S - _NAMED_S)
        for process in slow:
            process.wait(begin + _LEAVE_S - time.monotonic())

    def hosts(self) -> dict[str, str]:
        """Where each station works; empty if the run has one host."""
        if len(self._known_hosts) < 2:
            return {}
        return {name: group.first.host for name, group in self.groups.items()}

    # ------------------------------------------------------------ messages to and from stations

    def check_sender(self, station: str, incarnation: int) -> None:
        """UnfitMessage unless this is the present incarnation of a station, and that is not lost."""
        group = self.groups.get(station)
        if group is None or incarnation > group.incarnation:
            raise UnfitMessage("unknown_station", f"it is signed by {station!r}, incarnation {incarnation}")
        if incarnation < group.incarnation or station in self._seeking:
            self._dismiss_again(station, incarnation)
            raise UnfitMessage("earlier_incarnation", f"{station} sent it in incarnation {incarnation}, which is lost")

    def _dismiss_again(self, station: str, incarnation: int) -> None:
        """Tell one that was given up on a node out of reach, and that speaks again, to leave."""
        now = time.monotonic()
        if self._hosts is None or now < self._dismissed.get((station, incarnation), -math.inf) + _DISMISS_S:
            return
        self._dismissed[station, incarnation] = now
        content = wire.encode(wire.Dismissed(station, incarnation))
        for endpoint, parts in self._earlier.get((station, incarnation), ()):
            outbox = self._sockets.outbox(endpoint)
            outbox.send(wire.frame([(part, content) for part in range(parts)]))
            outbox.close(_DISMISS_S)

    def tell(self, station: str, message: wire.Message, slot: str = "") -> None:
        """Send to the station, to all its ranks, or to its part that has the slot; to all its parts what is about a
        device."""
        if isinstance(message, records.TakeDevice | records.YieldDevice):
            self.groups[station].tell_all(message)
            return
        self.groups[station].tell(message, self._parts[slot] if slot else 0)

    def note_heartbeat(self, beat: wire.Heartbeat, now: float) -> None:
        """A heartbeat of a present station. UnfitMessage: its numbers cannot be, or it has no such rank."""
        process = self.groups[beat.station].rank(beat.rank)
        lasted = 0 <= beat.for_s <= now - process.monitor.began
        if not lasted or beat.units < 0 or not all(map(math.isfinite, beat.statistics.values())):
            raise UnfitMessage("impossible", f"a heartbeat of {process.name} with {beat.for_s} s and {beat.statistics}")
        before = process.heartbeat
        if process.monitor.present or beat.doing != AWAITING:
            self.progress += bool(beat.doing) or before is None or beat.units != before.units
            self.progress += not process.monitor.present
        else:
            self.progress += bool(self.missing)  # else the run does not wait for this one
        process.heartbeat = beat
        if beat.pending_work is not None:
            self._pending_work[process.name] = beat.pending_work
        process.monitor.note_heartbeat(now, beat.doing, beat.for_s, beat.place)

    def ask_pending_work(self) -> None:
        """Ask every process that is ready what it has not finished."""
        self._pending_work = {}
        ready = [group for group in self.groups.values() if group.reachable]
        self._asked = [process.name for group in ready for process in group]
        for group in ready:
            group.tell(wire.Ping(pending_work=True))

    @property
    def all_answered(self) -> bool:
        """Whether every process that was asked has answered."""
        return all(name in self._pending_work for name in self._asked)

    def pending_work(self, station: str) -> list[str]:
        """What a station that was asked has not finished, in words; what several ranks say alike once."""
        answers, asked = self._pending_work, [p.name for p in self.groups[station] if p.name in self._asked]
        lines = (line for name in asked for line in answers.get(name, (f"{name} does not answer",)))
        return list(dict.fromkeys(lines))

    def current_call(self, station: str, now: float) -> str:
        """What the station is at, in words; "" between two units of work."""
        return self.groups[station].current_call(now)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Each station's counters as last heard, over all its incarnations."""
        found: dict[str, dict[str, float]] = {}
        for name, past in self._past.items():
            group = self.groups.get(name)
            found[name] = dict(past + (group.statistics() if group is not None else Counter()))
        return found


def log_file(logs: Path, station: str, incarnation: int, rank: int = 0, host: str = "") -> Path:
    """Where a rank of an incarnation of a station writes what it logs. host: of the run's several, "" if it has one."""
    return logs / host / f"{process_address(station, incarnation, rank)}.log"


def find_log(logs: Path, station: str, incarnation: int) -> Path:
    """The log of rank 0 of an incarnation, on whichever host it is; the one last written to, if a part of the run
    before this one has had the same elsewhere."""
    own = log_file(logs, station, incarnation)
    found = [file for file in (own, *logs.glob(f"*/{own.name}")) if file.is_file()]
    return max(found, key=lambda file: file.stat().st_mtime, default=own)


def _name_with_call(process: ChildProcess, now: float) -> str:
    call = process.monitor.current_call(now)
    return f"{process.name} ({call})" if call else process.name
