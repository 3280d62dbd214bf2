"""A process's memory of the run: the arena and the weights channel of its host, and by them what other hosts hold.

<folder>/arena             samples; blocks have one numbering over all hosts, each is written on one of them
<folder>/weights           what is published on this host: the trainer's and main's alone
<folder>/mirror            what was fetched from there, on the others
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.plugins.cluster.hosts.elsewhere import OtherHosts
from polyrhythm.plugins.cluster.hosts.pieces import largest_answer
from polyrhythm.plugins.cluster.parcels import SharedParcels
from polyrhythm.runtime import questions as q
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.ways import Ends
    from polyrhythm.runtime.memory.weights import Weights

ARENA, WEIGHTS, MIRROR = "arena", "weights", "mirror"


def segment_sizes(
    layout: ArenaLayout, weights: WeightsLayout, host: str, publishers: tuple[str, ...]
) -> dict[str, int]:
    """Bytes of each segment of a host."""
    sizes = {ARENA: layout.nbytes}
    if host in publishers:
        sizes[WEIGHTS] = shared_nbytes(weights)
    if {*publishers} - {host}:
        sizes[MIRROR] = shared_nbytes(weights)
    return sizes


class HostMemory:
    """folder: of the run on this host; view: the run's hosts, None if there is one; sockets: of this process. clients:
    of the other hosts' servers."""

    def __init__(
        self, layout: ArenaLayout, weights: WeightsLayout, folder: Path, view: q.HostView | None, sockets: Sockets
    ) -> None:
        self._layout, self._weights, self._folder, self._view = layout, weights, folder, view
        self.clients: dict[str, DataClient] = {}
        self._others: OtherHosts | None = None
        self._sockets = sockets
        for host, endpoint in view.servers.items() if view is not None else ():
            if view is not None and host != view.own:
                self.clients[host] = self.client(host, endpoint, view.answer_s)

    def client(self, host: str, endpoint: str, answer_s: float = q.ANSWER_S) -> DataClient:
        """A connection to the server of another host. answer_s: that an answer may take."""
        largest = max(q.PART_BYTES, largest_answer(self._layout)) + q.HEAD_BYTES
        return client_of(self._sockets, host, endpoint, answer_s, largest)

    def note_host(self, host: str, endpoint: str) -> None:
        """The run has another host. UnfitMessage: there can be none of this name, or not there."""
        view = self._view
        if view is None or host == view.own or host in self.clients or not self._sockets.could_be(endpoint):
            raise UnfitMessage("impossible", f"no other host of this run is {host!r} at {endpoint!r}")
        self.clients[host] = self.client(host, endpoint, view.answer_s)

    def arena(self) -> Arena:
        """The arena of this host, which fetches what lies on others."""
        view, memory = self._view, memoryview(open_segment(self._folder, ARENA))
        if view is None:
            return Arena(self._layout, memory)
        self._others = OtherHosts(self._layout, view.own, view.slots, self.clients)
        return Arena(self._layout, memory, self._others)

    def note_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host now. UnfitMessage: there is no such host."""
        if self._others is not None:
            self._others.note_slots(host, slots)

    def weights(self, device: str, ends: Ends | None) -> Weights:
        """This process's end of the weights channel, for a station on `device`. ValueError: the layout is damaged."""
        from polyrhythm.runtime.memory.channel import open_weights  # torch, which simulators do not need

        self._weights.verify()
        folder, view = self._folder, self._view
        if view is None or {*view.publishers} == {view.own}:
            return open_weights(self._weights, memoryview(open_segment(folder, WEIGHTS)), folder, device, ends)
        from polyrhythm.plugins.cluster.hosts.weights import HostWeights
        from polyrhythm.runtime.memory.weights import SharedWeights

        own = None
        if view.own in view.publishers:
            own = SharedWeights(self._weights, memoryview(open_segment(folder, WEIGHTS)), folder)
        locks = folder / f"{MIRROR}.locks"
        locks.mkdir(exist_ok=True)
        mirror = SharedWeights(self._weights, memoryview(open_segment(folder, MIRROR)), locks)
        others = [self.clients[host] for host in dict.fromkeys(view.publishers) if host != view.own]
        return HostWeights(own, others, mirror, locks)

    def parcels(self, owner: str) -> SharedParcels:
        """This process's end of the parcels. owner: its name."""
        return SharedParcels(self._folder, owner, self._view.own if self._view is not None else "", self.clients)

    def close(self) -> None:
        """End the connections."""
        for client in list(self.clients.values()):
            client.close()
