"""Which hosts a run has, which of them are lost, and on which each station works.

A host is lost when its agent does not answer: nobody can read what it holds. That is asked when a station is replaced,
because a lost host takes stations with it, or makes those fail that fetch from it. Its stations then get places on the
hosts that are left. The host of the trainer or of main cannot be lost: the run ends, and is resumed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient, HostSilent
from polyrhythm.runtime.hosts.nodes import Node
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.process import Handle

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A node, the host that it is on, and the run's folder there."""

    node: Node
    host: str
    folder: str


class HostDirectory:
    """places: of each station; slots: of each simulator; servers: of all hosts; publishers: hosts where weights are
    published. clients: by which main asks whether hosts answer; set before the first station is replaced."""

    def __init__(
        self,
        places: Mapping[str, Place],
        slots: Mapping[str, Sequence[str]],
        servers: Mapping[str, str],
        publishers: tuple[str, ...],
    ) -> None:
        self._places, self._slots, self._publishers = dict(places), slots, publishers
        self._servers = dict(servers)
        self._nodes = {place.node.name: place for place in places.values()}
        self.clients: Mapping[str, DataClient] = {}
        self.lost: set[str] = set()

    def host_of(self, station: str) -> str:
        return self._places[station].host

    def view(self, station: str) -> q.HostView:
        """What a process of the station that starts now knows of the hosts."""
        place = self._places[station]
        return self.view_from(q.HostView(place.host, place.folder, place.node.address))

    def view_from(self, own: q.HostView) -> q.HostView:
        """`own` with what all hosts hold now."""
        slots = {slot: self._places[name].host for name, its in self._slots.items() for slot in its}
        return replace(own, servers=dict(self._servers), slots=slots, publishers=self._publishers)

    def spawn(self, spec: ChildSpec, file: IO[bytes]) -> Handle:
        """Start a station's process on its node."""
        return self._places[spec.station].node.spawn(spec, file)

    def find_place(self, station: str) -> list[str]:
        """A place for the next incarnation of a station; the stations on hosts that are found to be lost now.

        RunHalted: the trainer's host is lost.
        """
        found = [host for host in self._servers if host in self.clients and not self._answers(host)]
        gone = [name for name, place in self._places.items() if place.host in found]
        for host in found:
            log.error("host %s does not answer: it is lost, and with it what it holds", host)
            self.lost.add(host)
            del self._servers[host]
            if host in self._publishers:
                raise RunHalted(
                    f"host {host} is lost, and the trainer with it; start again with resume, without its nodes"
                )
        if self._places[station].host in self.lost:
            self._places[station] = self._least_loaded()
            log.warning("%s goes to %s", station, self._places[station].node.name)
        return gone

    def _answers(self, host: str) -> bool:
        try:
            self.clients[host].ask(q.Held())
        except (HostSilent, LookupError):
            return False
        return True

    def _least_loaded(self) -> Place:
        """The node with the fewest stations, of those that are left."""
        counts = Counter(place.node.name for place in self._places.values())
        left = [place for place in self._nodes.values() if place.host not in self.lost]
        if not left:
            raise RunHalted("all hosts of the run are lost but main's; start again with resume")
        return min(left, key=lambda place: counts[place.node.name])
