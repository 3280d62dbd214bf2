"""What lies on other hosts, for the arena of this one.

A request is read by one generator, so its observations go straight into that generator's batch. A sample is written to
the block of the same number in this host's arena and read there in place: blocks have one numbering over all hosts, so
no other sample can lie in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.plugins.cluster.hosts.pieces import entries_at_a_time, request_of, write_part
from polyrhythm.plugins.cluster.transport.sealed import MOST_PIECES
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView
from polyrhythm.runtime.transport.drops import UnfitMessage


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

    def bring(self, arena: Arena, host: str, blocks: Sequence[int]) -> None:
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
                yield q.SampleEntries(block, 0, count)
            for block in blocks:
                while block not in found:
                    yield None
                for begin in range(count, int(found[block][0]) + 1, count):
                    asked.append((block, begin))
                    yield q.SampleEntries(block, begin, count)

        for answer in client.ask_all(questions(), q.AHEAD):
            block, begin = asked.popleft()
            head = write_part(arena, block, begin, answer)
            if (head != found.setdefault(block, head)).any():
                raise LookupError(f"the sample in block {block} of host {host} was replaced while it was fetched")
        for block, head in found.items():
            arena.head[block] = head
