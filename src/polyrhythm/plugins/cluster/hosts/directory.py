"""Which hosts a run has, which of them are lost, and on which node each process of its stations works.

A host is lost when its agent answers nothing for `heartbeat_s`, several questions, and none of its stations is heard
either; one alone may be slow. An agent that has ended, or answers nothing for three times as long, makes it lost though
its stations are heard: nobody can read what it holds. So does a process there that could not be ended: it may still
write. The host of main, or of the trainer's rank 0, cannot be lost: the run ends, and is resumed.

A process is named `rank_name(station, rank)`. The ranks of a station start and end together, each on a node of its own
choice: losing the host of one of them is losing the station. Those whose node is there start where they were.

    ended      the station has ended, hosts are being asked
    placed     it may start: each process where it was, or on a node that has room for it
    waiting    no node has room for one of its processes; the run goes on with less, or waits for a device that it
               needs, and ends after `_DEVICE_S`
    crowded    a process had to start without room, because the run needs so many; it moves to a node that has

Invariant: a process is placed only on a node that is there and whose host is not lost, as far as is known.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from polyrhythm.errors import HostLost, RunHalted
from polyrhythm.plugins.cluster.hosts.client import HostWatch
from polyrhythm.plugins.cluster.hosts.survey import HostedNode, Sight, Survey
from polyrhythm.runtime.hosts import MAIN, SAME, Changes, ClockOffset, Departure, HostView
from polyrhythm.runtime.launcher import ArenaPayloads
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.runtime.messages import rank_name, station_of
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory

log = logging.getLogger(__name__)

#: The memory of the processes of such a run.
_MEMORY = "polyrhythm.plugins.cluster.hosts.memory:HostMemory"
#: Seconds that a crowded station stays where it is: a move costs the work that it has under way.
_STAYS_S = 15.0
#: Seconds that a station which the run needs waits for a device before the run ends.
_DEVICE_S = 300.0
#: Times `heartbeat_s` for which an agent may be silent whose host is heard.
_ALONE = 3.0
#: A process that cannot reach main's host ends after so many times `heartbeat_s`, or so many seconds if that is more:
#: main has given it up by then.
_SILENCES, _SILENCE_S = 2.0, 15.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run needs of a cluster. cpus: of each process; least: of the stations of a kind, how many have to work
    even if they share CPUs or devices; those of no kind all have to. on_device: the processes that need a device."""

    cpus: Mapping[str, float] = field(default_factory=dict)
    least: Sequence[tuple[frozenset[str], int]] = ()
    on_device: frozenset[str] = frozenset()


NO_NEEDS = Needs()


def silence_limit(heartbeat_s: float) -> float:
    """Seconds after which a process ends itself that cannot reach main's host."""
    return max(_SILENCE_S, _SILENCES * heartbeat_s)


def by_station(processes: Iterable[str]) -> dict[str, list[str]]:
    """The processes of each station by rank, from their names (`rank_name`), of which rank 0's is the station's."""
    found: dict[str, list[str]] = {}
    for process in processes:
        own = found.get(station_of(process), [])
        if own and process == rank_name(own[0], len(own)):
            own.append(process)
        else:
            found[process] = [process]
    return found


class HostDirectory:
    """assigned: the node of each process, those of a station by rank; slots: of each simulator; servers: of all hosts;
    publishers: hosts where weights are published. survey: of the cluster's nodes, None where they are fixed; needs: of
    the stations there;
    heartbeat_s: seconds of silence that make a host lost; own: main's. on_host: called for each host that came, set
    before `advance`."""

    def __init__(
        self,
        assigned: Mapping[str, HostedNode],
        slots: Mapping[str, Sequence[str]],
        servers: Mapping[str, str],
        publishers: tuple[str, ...],
        survey: Survey | None = None,
        needs: Needs = NO_NEEDS,
        heartbeat_s: float = 20.0,
        own: HostedNode | None = None,
    ) -> None:
        self._assigned, self._slots, self._publishers = dict(assigned), slots, publishers
        self._ranks = by_station(assigned)
        self._station_of = {process: station for station, own in self._ranks.items() for process in own}
        self._servers, self._heartbeat_s = dict(servers), heartbeat_s
        self._own = own
        self._nodes = {hosted.node.name: hosted for hosted in assigned.values()}
        self._survey, self._needs = survey, needs
        self.lost: set[str] = set()
        self.on_host: Callable[[str, str], None] = lambda _host, _endpoint: None
        self._ended: dict[str, float] = {}  # since when
        self._waiting: list[str] = []  # the stations that no node has room for
        self._lacking: dict[str, float] = {}  # those of them that the run needs, which wait for a device; since when
        self._crowded: dict[str, float] = {}  # processes, since when
        self._open_watch: Callable[[str, str], HostWatch] | None = None
        self._watches: dict[str, HostWatch] = {}
        self._stopped: list[HostWatch] = []

    def watch_hosts(self, open_watch: Callable[[str, str], HostWatch]) -> None:
        """Ask all hosts but main's, those that come included, until `close`. open_watch: begins to ask one, by its name
        and the endpoint of its server."""
        self._open_watch = open_watch
        for host, endpoint in self._servers.items():
            if host != MAIN:
                self._watches[host] = open_watch(host, endpoint)

    def close(self) -> None:
        watches = [*self._watches.values(), *self._stopped]
        for watch in watches:
            watch.stop()
        for watch in watches:
            watch.close()

    def host_of(self, station: str) -> str:
        return self._assigned[station].host

    def view(self, process: str) -> HostView:
        hosted = self._assigned[process]
        own = HostView(hosted.host, hosted.folder, hosted.node.address, answer_s=self._heartbeat_s, memory=_MEMORY)
        places = [self._assigned[name] for name in self._ranks[self._station_of[process]]]
        ranks = tuple((one.host, one.node.address) for one in places)
        return self.view_from(replace(own, ranks=ranks, process=process))

    def view_from(self, own: HostView) -> HostView:
        """`own` with what all hosts hold now."""
        slots = {slot: self._assigned[name].host for name, its in self._slots.items() for slot in its}
        silence_s = silence_limit(self._heartbeat_s)
        return replace(own, servers=dict(self._servers), slots=slots, publishers=self._publishers, silence_s=silence_s)

    def offset_of(self, host: str) -> ClockOffset | None:
        if host == MAIN:
            return SAME
        watches = (*self._watches.values(), *self._stopped)
        return next((watch.offset() for watch in watches if watch.host == host), None)

    def spawn(self, spec: ChildSpec, file: IO[bytes]) -> ProcessHandle:
        return self._assigned[rank_name(spec.station, spec.rank)].node.spawn(spec, file)

    def on_station_ended(self, station: str, now: float) -> None:
        """A station has ended; `advance` says when it may start again: once all hosts have answered that are not lost,
        because a lost host takes stations with it, or makes those fail that fetch from it."""
        self._ended[station] = now
        for watch in self._watches.values():
            watch.ask()

    def advance(self, now: float, heard: Collection[str], *, starting: bool = False) -> Changes:
        """Take note of nodes that came and hosts that are lost, and find nodes for stations that wait. heard: the
        processes whose heartbeats come; starting: a station is not ready yet. HostLost: the host of the trainer's
        rank 0 is, or main's. RunHalted: the cluster is, or a station that the run needs has found no device."""
        if self._survey is not None and self._survey.failure:
            for hosted in self._nodes.values():
                hosted.node.give_up()  # nobody can end what runs there, so nobody waits for it
            raise RunHalted(f"{self._survey.failure}; start again with resume")
        hosts = self._take_new()
        leaving = self._lose({self._assigned[process].host for process in heard})
        answered = min((watch.answered for watch in self._watches.values()), default=now)
        known = max(answered, now - self._heartbeat_s)
        for station in [name for name, since in self._ended.items() if since <= known]:
            del self._ended[station]
            self._waiting.append(station)
        placed = [station for station in list(self._waiting) if self._assign_nodes(station, now)]
        if not (starting or self._ended or self._waiting or leaving):
            usable = self._usable()
            for process, since in self._crowded.items():
                if now < since + _STAYS_S or (better := self._node_with_room(process, usable, self._assigned)) is None:
                    continue
                why = Departure(f"moves to {better.node.name}, which has room", moves=True)
                leaving[self._station_of[process]] = why
                break  # one after another: each is idle until it is ready on its new node
        return Changes(hosts, leaving, placed)

    def _take_new(self) -> list[tuple[str, str]]:
        """The hosts of nodes that came; those of the nodes that are usable are told to the survey."""
        if self._survey is None:
            return []
        hosts = []
        for hosted, endpoint in self._survey.take():
            self._nodes[hosted.node.name] = hosted
            if endpoint:
                self._servers[hosted.host] = endpoint
                self.on_host(hosted.host, endpoint)
                if self._open_watch is not None:
                    self._watches[hosted.host] = self._open_watch(hosted.host, endpoint)
                hosts.append((hosted.host, endpoint))
            log.warning("%s has come: host %s", hosted.node.name, hosted.host)
        usable = {name for name, hosted in self._nodes.items() if hosted.host not in self.lost}
        if usable != self._survey.usable:
            self._survey.usable = frozenset(usable)
        return hosts

    def _lose(self, heard: Collection[str]) -> dict[str, Departure]:
        """Note which hosts are lost; the stations that have to leave them. heard: hosts of which a
        station is."""
        found = {host: reason for host, reason in self._find_lost(heard).items() if host in self._servers}
        for host, reason in found.items():
            log.error("host %s is lost, and with it what it holds: %s", host, reason)
            self.lost.add(host)
            del self._servers[host]
            if host in self._publishers:
                without = "" if host == MAIN else ", without its nodes"
                there = [self._station_of[name] for name, hosted in self._assigned.items() if hosted.host == host]
                raise HostLost(
                    f"host {host} is lost ({reason}), and the run needs it; start again with resume{without}",
                    host,
                    list(dict.fromkeys(there)),
                )
            if (watch := self._watches.pop(host, None)) is not None:
                watch.stop()
                self._stopped.append(watch)
            for name in [name for name, hosted in self._nodes.items() if hosted.host == host]:
                self._nodes[name].node.give_up()
                if self._survey is not None:
                    self._survey.withdraw(name)
        absent, leaving = {*self._ended, *self._waiting}, dict[str, Departure]()
        for process, hosted in self._assigned.items():
            if hosted.host in found and (station := self._station_of[process]) not in absent:
                whose = "is" if process == station and len(self._ranks[station]) == 1 else f"has {process}"
                leaving.setdefault(station, Departure(f"{whose} on host {hosted.host}, which is lost"))
        return leaving

    def _find_lost(self, heard: Collection[str]) -> dict[str, str]:
        """The hosts that are lost, with the reason."""
        found = {}
        for hosted in [*self._nodes.values(), *([self._own] if self._own is not None else [])]:
            if hosted.node.agent_failure:
                found[hosted.host] = hosted.node.agent_failure
            elif hosted.node.abandoned:
                found[hosted.host] = "a process there cannot be ended"
        for host, watch in self._watches.items():
            if watch.is_silent_for(self._heartbeat_s * (_ALONE if host in heard else 1.0)):
                found[host] = "it does not answer"
        return found

    def _assign_nodes(self, station: str, now: float) -> bool:
        """Find a node for each process of a station that waits; returns whether there is one for all."""
        absent = {*self._waiting, *self._ended}
        kinds = (len(names - absent) < least for names, least in self._needs.least if station in names)
        needed = next(kinds, True)
        usable, crowded = self._usable(), set[str]()
        placed = {
            name: hosted for name, hosted in self._assigned.items() if self._station_of[name] not in self._waiting
        }
        processes = self._ranks[station]
        for process in processes:
            before = self._assigned[process].node.name
            if before in usable and process not in self._crowded:
                placed[process] = usable[before]  # with another host, if that was lost and the node came back
        for process in [name for name in processes if name not in placed]:
            found = self._node_with_room(process, usable, placed)
            if found is None and needed:  # even where it has to share CPUs, or a device
                found = self._least_loaded(self._with_devices(usable, process), placed)
                crowded |= {process} if self._sight is not None else set()
            if found is None:
                self._lack_device(station, process, now, needed=needed)
                return False
            placed[process] = found
        self._waiting.remove(station)
        self._lacking.pop(station, None)
        for process in processes:
            found = placed[process]
            self._crowded.pop(process, None)
            if process in crowded:
                self._crowded[process] = now
            if found is not self._assigned[process]:
                self._assigned[process] = found
                lack = ", which has no room" if process in crowded else ""
                log.warning("%s goes to %s%s", process, found.node.name, lack)
        return True

    def _lack_device(self, station: str, process: str, now: float, *, needed: bool) -> None:
        """A process of a station has found no node. RunHalted: the run needs it, and has waited for a device."""
        if not needed:
            self._lacking.pop(station, None)
            return
        if station not in self._lacking:
            self._lacking[station] = now
            said = "%s waits for a device: no node of the run has one; the run ends if none comes within %g s"
            log.warning(said, process, _DEVICE_S)
        elif now >= self._lacking[station] + _DEVICE_S:
            raise RunHalted(
                f"{process}: no node has had a device for it for {_DEVICE_S:g} s; start again with resume, once the "
                "cluster has one or with fewer devices in `placement`"
            )

    @property
    def waiting(self) -> list[str]:
        """The stations that no node has room for, and that the run goes on without."""
        return [station for station in self._waiting if station not in self._lacking]

    @property
    def _sight(self) -> Sight | None:
        return self._survey.sight if self._survey is not None else None

    def _usable(self) -> dict[str, HostedNode]:
        there = self._sight.free if self._sight is not None else self._nodes
        return {
            name: hosted
            for name, hosted in self._nodes.items()
            if hosted.host not in self.lost and (name in there or self._survey is None or not hosted.node.leaves)
        }

    def _node_with_room(
        self, process: str, usable: Mapping[str, HostedNode], placed: Mapping[str, HostedNode]
    ) -> HostedNode | None:
        """The node that the cluster has reserved CPUs on for the process, or one with enough that nobody has. placed:
        the processes that are there, or are about to start."""
        sight = self._sight
        if sight is None:
            return self._least_loaded(self._with_devices(usable, process), placed) if self._survey is None else None
        if (name := sight.reserved.get(process, "")) in usable:
            return usable[name]
        if process in self._needs.on_device:
            return None  # the cluster reserves another device, once one is free
        need, free = self._needs.cpus.get(process, 0.0), dict(sight.free)
        for other in set(placed) - {process, *self._crowded}:
            if (name := placed[other].node.name) != sight.reserved.get(other):
                free[name] = free.get(name, 0.0) - self._needs.cpus.get(other, 0.0)
        fitting = {name: hosted for name, hosted in usable.items() if free.get(name, 0.0) >= need}
        return self._least_loaded(fitting, placed)

    def _with_devices(self, usable: Mapping[str, HostedNode], process: str) -> Mapping[str, HostedNode]:
        """The nodes where the process finds a device, if it needs one."""
        if not usable:
            raise RunHalted("all hosts of the run are lost but main's; start again with resume")
        if self._sight is None or process not in self._needs.on_device:
            return usable
        return {name: hosted for name, hosted in usable.items() if name in self._sight.with_devices}

    @staticmethod
    def _least_loaded(nodes: Mapping[str, HostedNode], placed: Mapping[str, HostedNode]) -> HostedNode | None:
        counts = Counter(hosted.node.name for hosted in placed.values())
        return min(nodes.values(), key=lambda hosted: counts[hosted.node.name], default=None)


class HostedPayloads(ArenaPayloads):
    """arena: of main's host `own`, which fetches what lies on others; hosts: of the simulators, and which are lost;
    in_flight: the table that the hosting checks events by."""

    def __init__(self, arena: Arena, own: str, hosts: HostDirectory, in_flight: InFlight) -> None:
        self.layout, self.arena, self.in_flight = arena.layout, arena, in_flight
        self._own, self._hosts = own, hosts
        self._where: dict[int, str] = {}
        self._reported: set[str] = set()  # lost payloads that the conductor has been told of
        self._seen_lost = 0  # hosts that were lost when it was last told

    def assign(self, command: records.StartRows) -> records.StartRows:
        command = self.in_flight.assign(command)
        host = self._hosts.host_of(command.simulator)
        self._where |= {grant.block: host for grant in command.grants}
        return command

    def on_event(self, event: records.Event) -> None:
        self.in_flight.on_event(event)
        if isinstance(event, records.StationLost):
            self._reported.clear()  # a trainer may have had some of them
            self._seen_lost = 0
        elif isinstance(event, records.SampleFinished):
            self._seen_lost = 0

    def release(self, payload_ids: Iterable[str]) -> None:
        payload_ids = tuple(payload_ids)
        self.in_flight.release(payload_ids)
        self._reported.difference_update(payload_ids)

    def take_lost(self) -> records.PayloadsLost | None:
        if len(self._hosts.lost) == self._seen_lost:
            return None
        lost: dict[str, list[str]] = {}
        for payload_id in self.in_flight.finished():
            host = self._where.get(int(payload_id), self._own)
            if host in self._hosts.lost and payload_id not in self._reported:
                lost.setdefault(host, []).append(payload_id)
        for host, payload_ids in lost.items():
            self._reported.update(payload_ids)
            return records.PayloadsLost(host, tuple(payload_ids))
        self._seen_lost = len(self._hosts.lost)
        return None

    def locate(self, payload_ids: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._locate(payload_id) for payload_id in payload_ids)

    def _locate(self, payload_id: str) -> str:
        block = self.arena.block_of(payload_id)
        return f"{self._where.get(block, self._own)}/{block}"

    def put(self, payload_id: str, trajectory: Trajectory) -> None:
        block = self.arena.block_of(payload_id)
        self.arena.store(block, trajectory)
        self._where[block] = self._own

    def read(self, payload_id: str) -> Trajectory:
        if "/" not in payload_id:
            payload_id = self._locate(payload_id)
        self.arena.fetch([payload_id])
        return self.arena.read(payload_id)
