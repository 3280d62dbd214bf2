"""A process's memory of a run on several hosts: what its host holds, and by that what other hosts hold.

    <folder>/arena      samples; blocks have one numbering over all hosts, each is written on one of them
    <folder>/weights    what is published on this host: the trainer's and main's alone
    <folder>/mirror     what the host's agent has brought from there (`relay`), on the others
    <folder>/identity   the host's token: two processes share memory if one finds it in the folder of the other

A request is read by one generator, so its observations go straight into that generator's batch. A sample is written to
the block of the same number in this host's arena and read there in place; no other sample can lie in it.
"""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from numpy.typing import NDArray

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostWatch, client_of
from polyrhythm.plugins.cluster.hosts.pieces import entries_at_a_time, largest_answer, request_of, write_part
from polyrhythm.plugins.cluster.hosts.relay import MIRROR, mirror_locks, route
from polyrhythm.plugins.cluster.sealed import MOST_PIECES
from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.hosts import MAIN, HostView
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView
from polyrhythm.runtime.memory.process_memory import ARENA, WEIGHTS, ProcessMemory, open_weights
from polyrhythm.runtime.memory.published import PublishedMemory, shared_nbytes
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

if TYPE_CHECKING:
    from polyrhythm.plugins.cluster.hosts.pair_weights import PairWeights
    from polyrhythm.plugins.cluster.hosts.pairs import PairSender
    from polyrhythm.plugins.cluster.hosts.weights import HostWeights
    from polyrhythm.runtime.memory.published import Ends
    from polyrhythm.runtime.memory.weights import Weights

#: Its input ends when the process does that has the other end of it.
_SCRIPT = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$1"'


def start_cleaner(path: Path) -> subprocess.Popen[bytes]:
    """A shell that removes the path once this process has ended. As a context it ends with that, the path too.

    It has none of this process's output: who reads that, as `tee` does, waits until all who have it have ended."""
    words, none = ["/bin/sh", "-c", _SCRIPT, "sh", str(path)], subprocess.DEVNULL
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True)  # noqa: S603


class OtherHosts:
    """clients: of the other hosts' servers; slots: the host of each slot; own: this host."""

    def __init__(
        self, layout: ArenaLayout, own: str, slots: Mapping[str, str], clients: Mapping[str, DataClient]
    ) -> None:
        self._layout, self.own, self._clients = layout, own, clients
        self._slots = {slot: host for slot, host in slots.items() if host != own}

    def move_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host from now on. UnfitMessage: there is no such host."""
        if host == self.own:
            for slot in slots:
                self._slots.pop(slot, None)
        elif host in self._clients:
            self._slots.update(dict.fromkeys(slots, host))
        else:
            raise UnfitMessage("impossible", f"there is no host {host}")

    def requests(self, posted: Sequence[tuple[str, int]]) -> dict[str, RequestView]:
        """Those of these requests (slot, rows) that lie on other hosts, by slot; one question to each host, or
        several where the answer would have too many pieces.
        LookupError: one of these hosts is lost."""
        by_host: dict[str, list[tuple[str, int]]] = {}
        for slot, rows in posted:
            if slot in self._slots:
                by_host.setdefault(self._slots[slot], []).append((slot, rows))
        found = {}
        each = 2 + len(self._layout.obs)
        most = (MOST_PIECES - 1) // each
        for host, asked in by_host.items():
            if host not in self._clients:
                raise LookupError(f"slot {asked[0][0]} lies on host {host}, which is lost")
            for begin in range(0, len(asked), most):
                part = asked[begin : begin + most]
                pieces = self._clients[host].ask(q.Posted(part))
                for place, (slot, rows) in enumerate(part):
                    found[slot] = request_of(self._layout, rows, pieces[place * each : (place + 1) * each])
        return found

    def bring(self, arena: Arena, host: str, blocks: Sequence[int], *, obs: bool = True) -> None:
        """Copy the samples in these blocks of another host, in parts, several of which are on their way at a time: the
        limit of an answer is that of a part. LookupError: one of them is not there, or no such host."""
        if host not in self._clients:
            raise LookupError(f"block {blocks[0]} lies on host {host}, which this process cannot read")
        client, count = self._clients[host], entries_at_a_time(self._layout)
        asked = deque[tuple[int, int]]()
        found: dict[int, NDArray[Any]] = {}

        def questions() -> Iterator[q.SampleEntries | None]:
            """The first part of each, which says how many there are, then the others."""
            for block in blocks:
                asked.append((block, 0))
                yield q.SampleEntries(block, 0, count, obs)
            for block in blocks:
                while block not in found:
                    yield None
                for begin in range(count, int(found[block][0]) + 1, count):
                    asked.append((block, begin))
                    yield q.SampleEntries(block, begin, count, obs)

        for answer in client.ask_all(questions(), q.AHEAD):
            block, begin = asked.popleft()
            head = write_part(arena, block, begin, answer, obs=obs)
            if (head != found.setdefault(block, head)).any():
                raise LookupError(f"the sample in block {block} of host {host} was replaced while it was fetched")
        for block, head in found.items():
            arena.head[block] = head


def segment_sizes(
    layout: ArenaLayout, weights: WeightsLayout, host: str, publishers: tuple[str, ...]
) -> dict[str, int]:
    sizes = {ARENA: layout.nbytes}
    if host in publishers:
        sizes[WEIGHTS] = shared_nbytes(weights)
    if {*publishers} - {host}:
        sizes[MIRROR] = shared_nbytes(weights)
    return sizes


class HostMemory(ProcessMemory):
    """view: the run's hosts; sockets: of this process. On another host than main's it asks that one
    again and again whether it is there."""

    def __init__(
        self, layout: ArenaLayout, weights: WeightsLayout, folder: Path, view: HostView, sockets: Sockets
    ) -> None:
        super().__init__(layout, weights, folder)
        self.host, self.address, self.ranks = view.own, view.address, view.ranks
        self._view, self._sockets = view, sockets
        self.clients: dict[str, DataClient] = {}
        self._others: OtherHosts | None = None
        self._watch: HostWatch | None = None
        for host, endpoint in view.servers.items():
            if host != view.own:
                self.clients[host] = self.client(host, endpoint, view.answer_s)
        self._endpoints = dict(view.servers)
        self._agent: DataClient | None = None
        self._pairs: PairSender | PairWeights | None = None
        if MAIN in self.clients:
            self._watch = HostWatch(self.client(MAIN, view.servers[MAIN]))

    def is_cut_off(self) -> bool:
        return self._watch is not None and self._watch.is_silent_for(self._view.silence_s)

    def find_meeting(self, host: str, name: str) -> bytes:
        if host == self.host:
            return super().find_meeting(host, name)
        try:
            return b"".join(self.clients[host].ask(q.RunFile(name)))
        except LookupError:
            return b""

    def client(self, host: str, endpoint: str, answer_s: float = q.ANSWER_S) -> DataClient:
        """A connection to the server of another host. answer_s: that an answer may take."""
        largest = max(q.PART_BYTES, largest_answer(self._layout)) + q.HEAD_BYTES
        return client_of(self._sockets, host, endpoint, answer_s, largest)

    def add_host(self, host: str, endpoint: str) -> None:
        view = self._view
        if host == view.own or host in self.clients or not self._sockets.could_be(endpoint):
            raise UnfitMessage("impossible", f"no other host of this run is {host!r} at {endpoint!r}")
        self.clients[host] = self.client(host, endpoint, view.answer_s)
        self._endpoints[host] = endpoint

    def arena(self) -> Arena:
        self._others = OtherHosts(self._layout, self.host, self._view.slots, self.clients)
        return Arena(self._layout, memoryview(open_segment(self.folder, ARENA)), self._others)

    def move_slots(self, host: str, slots: Sequence[str]) -> None:
        if self._others is not None:
            self._others.move_slots(host, slots)

    def weights(self, device: str, ends: Ends | None, local: str = CPU) -> Weights:
        self._weights.verify()
        folder, view = self.folder, self._view
        if ends is not None and ends.pairs and view.process == TRAINER and device != CPU:
            self._serve_pairs(local)
        if {*view.publishers} == {view.own}:
            return open_weights(self._weights, memoryview(open_segment(folder, WEIGHTS)), folder, device, ends)
        from polyrhythm.plugins.cluster.hosts.weights import HostWeights, Mirror  # torch, which simulators do not need
        from polyrhythm.runtime.memory.weights import SharedWeights

        own, here = None, view.own == view.publishers[0]
        if view.own in view.publishers:
            segment = memoryview(open_segment(folder, WEIGHTS))
            own = open_weights(self._weights, segment, folder, device, ends if here else None)
        memory = SharedWeights(self._weights, memoryview(open_segment(folder, MIRROR)), mirror_locks(folder))
        self._agent = self.client(view.own, view.servers[view.own], view.answer_s)
        others = [self.clients[host] for host in dict.fromkeys(view.publishers) if host != view.own]
        host = HostWeights(own, others, Mirror(memory, self._agent, self._route))
        if ends is None or not ends.pairs or CPU in (device, ends.trainer) or here:
            return host
        return self._by_pairs(host, local)

    def _serve_pairs(self, local: str) -> None:
        """Send what is published here to devices of other hosts."""
        from polyrhythm.plugins.cluster.hosts.pairs import PairSender
        from polyrhythm.runtime.memory.tensors import Device

        memory = PublishedMemory(self._weights, memoryview(open_segment(self.folder, WEIGHTS)), self.folder)
        self._pairs = PairSender(memory, self.folder, Device(local), self._sockets)

    def _by_pairs(self, host: HostWeights, local: str) -> PairWeights:
        """The end of a generator on a device, where the trainer is on one of another host."""
        from polyrhythm.plugins.cluster.hosts.pair_weights import PairWeights
        from polyrhythm.runtime.memory.tensors import Device

        publisher = self._view.publishers[0]
        asked = self.clients[publisher]

        def find() -> tuple[DataClient, str]:
            endpoint = "".join(bytes(piece).decode() for piece in asked.ask(q.RunFile(q.PAIR_FILE)))
            address = urlsplit(endpoint).hostname
            if address is None or not self._sockets.could_be(endpoint):
                raise LookupError(f"no process of host {publisher} is at {endpoint!r}")
            return self.client(publisher, endpoint, q.PAIR_S), address

        self._pairs = PairWeights(host, publisher, Device(local), find, self._view.address)
        return self._pairs

    def _route(self, publisher: str) -> list[tuple[str, str]]:
        """The hosts from which a version of this publisher comes, see `relay.route`. The tree has those that came
        later at its end; main's, which all others depend on, passes nothing on."""
        relays = sorted({*self._endpoints} - {MAIN, *self._view.publishers}, key=lambda host: (len(host), host))
        return [(host, self._endpoints[host]) for host in route(self.host, [publisher, *relays])]

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._pairs is not None:
            self._pairs.close()
        for client in (*self.clients.values(), *([self._agent] if self._agent is not None else [])):
            client.close()
