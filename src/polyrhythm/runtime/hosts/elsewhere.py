"""What lies on other hosts, for the arena of this one.

A request is read by one generator, so its observations go straight into that generator's batch. A sample is written to
the block of the same number in this host's arena and read there in place: blocks have one numbering over all hosts, so
no other sample can lie in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient
from polyrhythm.runtime.hosts.pieces import entries_at_a_time, request_of, write_part
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, RequestView
from polyrhythm.runtime.transport.drops import UnfitMessage


class OtherHosts:
    """clients: of the other hosts' servers; slots: the host of each slot; own: this host."""

    def __init__(
        self, layout: ArenaLayout, own: str, slots: Mapping[str, str], clients: Mapping[str, DataClient]
    ) -> None:
        self._layout, self.own, self._clients = layout, own, clients
        self._slots = {slot: host for slot, host in slots.items() if host != own}

    def note_slots(self, host: str, slots: Sequence[str]) -> None:
        """Requests of these slots lie on this host from now on. UnfitMessage: there is no such host."""
        if host == self.own:
            for slot in slots:
                self._slots.pop(slot, None)
        elif host in self._clients:
            self._slots.update(dict.fromkeys(slots, host))
        else:
            raise UnfitMessage("impossible", f"there is no host {host}")

    def requests(self, posted: Sequence[tuple[str, int]]) -> dict[str, RequestView]:
        """Those of these requests (slot, rows) that lie on other hosts, by slot; one question to each host.
        LookupError: one of these hosts is lost."""
        by_host: dict[str, list[tuple[str, int]]] = {}
        for slot, rows in posted:
            if slot in self._slots:
                by_host.setdefault(self._slots[slot], []).append((slot, rows))
        found = {}
        each = 2 + len(self._layout.obs)
        for host, asked in by_host.items():
            if host not in self._clients:
                raise LookupError(f"slot {asked[0][0]} lies on host {host}, which is lost")
            pieces = self._clients[host].ask(q.Posted(asked))
            for place, (slot, rows) in enumerate(asked):
                found[slot] = request_of(self._layout, rows, pieces[place * each : (place + 1) * each])
        return found

    def bring(self, arena: Arena, host: str, blocks: Sequence[int]) -> None:
        """Copy the samples in these blocks of another host, in parts, several of which are on their way at a time: the
        limit of an answer is that of a part. LookupError: one of them is not there, or no such host."""
        if host not in self._clients:
            raise LookupError(f"block {blocks[0]} lies on host {host}, which this process cannot read")
        client, count = self._clients[host], entries_at_a_time(self._layout)
        heads = []
        first = client.ask_all((q.Sample(block, 0, count) for block in blocks), q.AHEAD)
        for answer, block in zip(first, blocks, strict=True):
            heads.append(write_part(arena, block, 0, answer))
        sizes = [(block, int(head[0]) + 1) for block, head in zip(blocks, heads, strict=True)]
        rest = [(block, begin) for block, entries in sizes for begin in range(count, entries, count)]
        found = dict(zip(blocks, heads, strict=True))
        following = client.ask_all((q.Sample(block, begin, count) for block, begin in rest), q.AHEAD)
        for answer, (block, begin) in zip(following, rest, strict=True):
            if (write_part(arena, block, begin, answer) != found[block]).any():
                raise LookupError(f"the sample in block {block} of host {host} was replaced while it was fetched")
        for block, head in found.items():
            arena.head[block] = head
