"""A process's memory of a run on several hosts: what its host holds, and by that what other hosts hold.

<folder>/arena             samples; blocks have one numbering over all hosts, each is written on one of them
<folder>/weights           what is published on this host: the trainer's and main's alone
<folder>/mirror            what was fetched from there, on the others
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.plugins.cluster.hosts.elsewhere import OtherHosts
from polyrhythm.plugins.cluster.hosts.pieces import largest_answer
from polyrhythm.plugins.cluster.hosts.watch import HostWatch
from polyrhythm.runtime.hosts import MAIN, HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.process_memory import ARENA, WEIGHTS, open_weights
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.runtime.memory.ways import Ends
    from polyrhythm.runtime.memory.weights import Weights

MIRROR = "mirror"


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
    """A `ProcessMemory`. view: the run's hosts; sockets: of this process. On another host than main's it asks that one
    again and again whether it is there."""

    def __init__(
        self, layout: ArenaLayout, weights: WeightsLayout, folder: Path, view: HostView, sockets: Sockets
    ) -> None:
        self.folder, self.host = folder, view.own
        self._layout, self._weights, self._view, self._sockets = layout, weights, view, sockets
        self.clients: dict[str, DataClient] = {}
        self._others: OtherHosts | None = None
        self._watch: HostWatch | None = None
        for host, endpoint in view.servers.items():
            if host != view.own:
                self.clients[host] = self.client(host, endpoint, view.answer_s)
        if MAIN in self.clients:
            self._watch = HostWatch(self.client(MAIN, view.servers[MAIN]))

    def is_cut_off(self) -> bool:
        return self._watch is not None and self._watch.is_silent_for(self._view.silence_s)

    def client(self, host: str, endpoint: str, answer_s: float = q.ANSWER_S) -> DataClient:
        """A connection to the server of another host. answer_s: that an answer may take."""
        largest = max(q.PART_BYTES, largest_answer(self._layout)) + q.HEAD_BYTES
        return client_of(self._sockets, host, endpoint, answer_s, largest)

    def add_host(self, host: str, endpoint: str) -> None:
        """The run has another host. UnfitMessage: there can be none of this name, or not there."""
        view = self._view
        if host == view.own or host in self.clients or not self._sockets.could_be(endpoint):
            raise UnfitMessage("impossible", f"no other host of this run is {host!r} at {endpoint!r}")
        self.clients[host] = self.client(host, endpoint, view.answer_s)

    def arena(self) -> Arena:
        """The arena of this host, which fetches what lies on others."""
        self._others = OtherHosts(self._layout, self.host, self._view.slots, self.clients)
        return Arena(self._layout, memoryview(open_segment(self.folder, ARENA)), self._others)

    def move_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host now. UnfitMessage: there is no such host."""
        if self._others is not None:
            self._others.move_slots(host, slots)

    def weights(self, device: str, ends: Ends | None) -> Weights:
        """This process's end of the weights channel, for a station on `device`. ValueError: the layout is damaged."""
        self._weights.verify()
        folder, view = self.folder, self._view
        if {*view.publishers} == {view.own}:
            return open_weights(self._weights, memoryview(open_segment(folder, WEIGHTS)), folder, device, ends)
        from polyrhythm.plugins.cluster.hosts.weights import HostWeights  # torch, which simulators do not need
        from polyrhythm.runtime.memory.weights import SharedWeights

        own = None
        if view.own in view.publishers:
            own = SharedWeights(self._weights, memoryview(open_segment(folder, WEIGHTS)), folder)
        locks = folder / f"{MIRROR}.locks"
        locks.mkdir(exist_ok=True)
        mirror = SharedWeights(self._weights, memoryview(open_segment(folder, MIRROR)), locks)
        others = [self.clients[host] for host in dict.fromkeys(view.publishers) if host != view.own]
        return HostWeights(own, others, mirror, locks)

    def close(self) -> None:
        """End the connections."""
        if self._watch is not None:
            self._watch.close()
        for client in list(self.clients.values()):
            client.close()
