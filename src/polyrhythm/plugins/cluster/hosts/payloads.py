"""Payloads in the arenas of several hosts, as the main process sees them.

Blocks have one numbering over all hosts, and a block is written on one of them: that of the simulator that got it. So
the conductor, the pool and the stations of a host name a block by its number; what another host is told of it is
`host/block`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory


class BlockHosts(Protocol):
    """The hosts of a run. lost: those that do not answer any more."""

    @property
    def lost(self) -> AbstractSet[str]: ...

    def host_of(self, station: str) -> str: ...


class HostedPayloads:
    """arena: of main's host `own`, which fetches what lies on others; hosts: of the simulators, and which are lost;
    in_flight: the table that the hosting checks events by."""

    def __init__(self, arena: Arena, own: str, hosts: BlockHosts, in_flight: InFlight) -> None:
        self.layout, self.arena, self.in_flight = arena.layout, arena, in_flight
        self._own, self._hosts = own, hosts
        self._where: dict[int, str] = {}
        self._told: set[str] = set()  # lost payloads that the conductor has been told of
        self._seen_lost = 0  # hosts that were lost when it was last told

    def assign(self, command: records.StartRows) -> records.StartRows:
        command = self.in_flight.assign(command)
        host = self._hosts.host_of(command.simulator)
        self._where |= {grant.block: host for grant in command.grants}
        return command

    def on_event(self, event: records.Event) -> None:
        self.in_flight.on_event(event)
        if isinstance(event, records.StationLost):
            self._told.clear()  # a trainer may have had some of them
            self._seen_lost = 0
        elif isinstance(event, records.SampleFinished):
            self._seen_lost = 0

    def release(self, payload_ids: Iterable[str]) -> None:
        payload_ids = tuple(payload_ids)
        self.in_flight.release(payload_ids)
        self._told.difference_update(payload_ids)

    def take_lost(self) -> records.PayloadsLost | None:
        if len(self._hosts.lost) == self._seen_lost:
            return None
        lost: dict[str, list[str]] = {}
        for payload_id in self.in_flight.finished():
            host = self._where.get(int(payload_id), self._own)
            if host in self._hosts.lost and payload_id not in self._told:
                lost.setdefault(host, []).append(payload_id)
        for host, payload_ids in lost.items():
            self._told.update(payload_ids)
            return records.PayloadsLost(host, tuple(payload_ids))
        self._seen_lost = len(self._hosts.lost)
        return None

    def locate(self, payload_ids: Sequence[str]) -> tuple[str, ...]:
        """`host/block` for each block."""
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
