"""Which hosts a run has, which of them are lost, and on which node each station works.

A host is lost when its agent does not answer, or when a process there could not be ended: then nobody can read what it
holds, or somebody may still write to it. That is asked when a station is replaced, because a lost host takes stations
with it, or makes those fail that fetch from it. The host of the trainer or of main cannot be lost: the run ends, and is
resumed.

    sought     the station has ended, hosts are being asked
    placed     it may start: where it was, or on a node that has room for it
    waiting    no node has room; the run goes on with less
    crowded    it had to start without room, because the run needs so many; it moves to a node that has

Invariant: a station is placed only on a node that is there and whose host is not lost, as far as is known.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient
from polyrhythm.runtime.hosts.probes import HostProbes
from polyrhythm.runtime.hosts.survey import Place, Sight, Survey
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import Handle

log = logging.getLogger(__name__)

#: Seconds that a crowded station stays where it is: a move costs the work that it has under way.
_STAYS_S = 15.0


@dataclass(frozen=True, slots=True)
class Needs:
    """What stations need of a cluster. cpus: of each; least: of the stations of a kind, how many have to work even if
    they share CPUs; those of no kind all have to."""

    cpus: Mapping[str, float] = field(default_factory=dict)
    least: Sequence[tuple[frozenset[str], int]] = ()


NO_NEEDS = Needs()


class HostDirectory:
    """places: of each station; slots: of each simulator; servers: of all hosts; publishers: hosts where weights are
    published. survey: of the cluster's nodes, None where they are fixed; needs: of the stations there. clients: by
    which main asks whether hosts answer; on_host: called for each host that came; both set before `advance`."""

    def __init__(
        self,
        places: Mapping[str, Place],
        slots: Mapping[str, Sequence[str]],
        servers: Mapping[str, str],
        publishers: tuple[str, ...],
        survey: Survey | None = None,
        needs: Needs = NO_NEEDS,
        silence_s: float = float("inf"),
    ) -> None:
        self._places, self._slots, self._publishers = dict(places), slots, publishers
        self._servers, self._silence_s = dict(servers), silence_s
        self._nodes = {place.node.name: place for place in places.values()}
        self._survey, self._needs = survey, needs
        self.lost: set[str] = set()
        self.on_host: Callable[[str, str], None] = lambda _host, _endpoint: None
        self._sought: dict[str, set[str]] = {}
        self._waiting: list[str] = []
        self._crowded: dict[str, float] = {}  # since when
        self.clients = {}

    @property
    def clients(self) -> Mapping[str, DataClient]:
        return self._clients

    @clients.setter
    def clients(self, clients: Mapping[str, DataClient]) -> None:
        self._clients, self._probes = clients, HostProbes(clients)

    def host_of(self, station: str) -> str:
        return self._places[station].host

    def view(self, station: str) -> q.HostView:
        """What a process of the station that starts now knows of the hosts."""
        place = self._places[station]
        return self.view_from(q.HostView(place.host, place.folder, place.node.address))

    def view_from(self, own: q.HostView) -> q.HostView:
        """`own` with what all hosts hold now."""
        slots = {slot: self._places[name].host for name, its in self._slots.items() for slot in its}
        return replace(
            own, servers=dict(self._servers), slots=slots, publishers=self._publishers, silence_s=self._silence_s
        )

    def spawn(self, spec: ChildSpec, file: IO[bytes]) -> Handle:
        """Start a station's process on its node."""
        return self._places[spec.station].node.spawn(spec, file)

    # ------------------------------------------------------------ places

    @property
    def waiting(self) -> Sequence[str]:
        """The stations that no node has room for."""
        return self._waiting

    def suspect(self) -> None:
        """A station is being ended: ask all hosts."""
        self._probes.begin(set(self._servers) & set(self._clients))

    def seek(self, station: str) -> None:
        """A station has ended; `advance` says when it may start again."""
        self.suspect()
        hosts = set(self._servers) & set(self._clients)
        self._sought[station] = hosts & self._probes.asked

    def advance(self, now: float) -> q.Changes:
        """Take note of nodes that came and hosts that are lost, and find places. RunHalted: the trainer's host is
        lost."""
        hosts = self._take_new()
        leaving = self._lose(self._probes.take_silent())
        answered = [station for station, asked in self._sought.items() if not asked & self._probes.asked]
        for station in answered:
            del self._sought[station]
            self._waiting.append(station)
        placed = [station for station in list(self._waiting) if self._place(station, now)]
        if not self._sought and not self._waiting and not leaving:
            leaving |= self._move(now)
        return q.Changes(hosts, leaving, placed)

    def _take_new(self) -> list[tuple[str, str]]:
        """The hosts of nodes that came; those of the nodes that are usable are told to the survey."""
        if self._survey is None:
            return []
        hosts = []
        for place, endpoint in self._survey.take():
            self._nodes[place.node.name] = place
            if endpoint:
                self._servers[place.host] = endpoint
                self.on_host(place.host, endpoint)
                hosts.append((place.host, endpoint))
            log.warning("%s has come: host %s", place.node.name, place.host)
        usable = {name for name, place in self._nodes.items() if place.host not in self.lost}
        if usable != self._survey.usable:
            self._survey.usable = frozenset(usable)
        return hosts

    def _lose(self, silent: Sequence[str]) -> dict[str, str]:
        """Note which hosts are lost; the stations that have to leave them, with the reason."""
        why = dict.fromkeys(silent, "does not answer")
        for place in self._nodes.values():
            if place.node.abandoned and place.host not in self._publishers:
                why.setdefault(place.host, "has a process that cannot be ended")
        found = {host: reason for host, reason in why.items() if host in self._servers and host in self._clients}
        for host, reason in found.items():
            log.error("host %s %s: it is lost, and with it what it holds", host, reason)
            self.lost.add(host)
            del self._servers[host]
            if host in self._publishers:
                raise RunHalted(
                    f"host {host} is lost, and the trainer with it; start again with resume, without its nodes"
                )
            for name in [name for name, place in self._nodes.items() if place.host == host]:
                if self._survey is not None:
                    self._survey.withdraw(name)
        gone = {name: place.host for name, place in self._places.items() if place.host in found}
        absent = {*self._sought, *self._waiting}
        return {name: f"is on host {host}, which is lost" for name, host in gone.items() if name not in absent}

    def _place(self, station: str, now: float) -> bool:
        """Find a place for a station that waits; whether there is one."""
        before, found = self._places[station], None
        usable = self._usable()
        if before.node.name in usable and station not in self._crowded:
            found = usable[before.node.name]  # with another host, if that was lost and the node came back
        else:
            found = self._with_room(station, usable)
            self._crowded.pop(station, None)
            if found is None and self._has_to_work(station):
                found = self._least_loaded(usable)
                if self._sight is not None:
                    self._crowded[station] = now
        if found is None:
            return False
        self._waiting.remove(station)
        if found is not before:
            self._places[station] = found
            room = ", which has no room" * (station in self._crowded)
            log.warning("%s goes to %s%s", station, found.node.name, room)
        return True

    @property
    def _sight(self) -> Sight | None:
        return self._survey.sight if self._survey is not None else None

    def _usable(self) -> dict[str, Place]:
        """The nodes that are there and whose hosts are not lost."""
        there = self._sight.free if self._sight is not None else self._nodes
        return {
            name: place
            for name, place in self._nodes.items()
            if place.host not in self.lost and (name in there or self._survey is None or not place.node.leaves)
        }

    def _with_room(self, station: str, usable: Mapping[str, Place]) -> Place | None:
        """The node that the cluster has reserved CPUs on for the station, or one with enough that nobody has."""
        sight = self._sight
        if sight is None:
            return self._least_loaded(usable) if self._survey is None else None
        if (name := sight.reserved.get(station, "")) in usable:
            return usable[name]
        need, free = self._needs.cpus.get(station, 0.0), dict(sight.free)
        for other in set(self._places) - {station, *self._waiting, *self._crowded}:
            if (name := self._places[other].node.name) != sight.reserved.get(other):
                free[name] = free.get(name, 0.0) - self._needs.cpus.get(other, 0.0)
        roomy = {name: place for name, place in usable.items() if free.get(name, 0.0) >= need}
        return self._least_loaded(roomy) if roomy else None

    def _has_to_work(self, station: str) -> bool:
        """Whether the run needs it even where it has to share CPUs."""
        for names, least in self._needs.least:
            if station in names:
                return len(names - set(self._waiting) - set(self._sought)) < least
        return True

    def _least_loaded(self, usable: Mapping[str, Place]) -> Place:
        """The node with the fewest stations."""
        if not usable:
            raise RunHalted("all hosts of the run are lost but main's; start again with resume")
        counts = Counter(place.node.name for name, place in self._places.items() if name not in self._waiting)
        return min(usable.values(), key=lambda place: counts[place.node.name])

    def _move(self, now: float) -> dict[str, str]:
        """The first crowded station that a node has room for now, with the reason for its leaving."""
        usable = self._usable()
        for station, since in self._crowded.items():
            if now >= since + _STAYS_S and (place := self._with_room(station, usable)) is not None:
                return {station: f"{q.MOVES} to {place.node.name}, which has room"}
        return {}
