"""Payloads in the arenas of several hosts, as the main process sees them.

Blocks have one numbering over all hosts, and a block is written on one of them: that of the simulator that got it. So
the conductor, the pool and the stations of a host name a block by its number; what another host is told of it is
`host/block`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.blocks import BlockPool
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory


class HostedPayloads:
    """arena: of main's host `own`, which fetches what lies on others; hosts: of the simulators."""

    def __init__(self, arena: Arena, own: str, hosts: Mapping[str, str]) -> None:
        self.layout, self.arena, self.pool = arena.layout, arena, BlockPool(arena.layout.blocks)
        self._own, self._hosts = own, hosts
        self._where: dict[int, str] = {}
        self.release = self.pool.release

    def assign(self, command: records.StartRows) -> Sequence[int]:
        blocks = self.pool.assign(command)
        self._where.update(dict.fromkeys(blocks, self._hosts[command.simulator]))
        return blocks

    def hear(self, event: records.Event) -> None:
        if isinstance(event, records.StationLost):
            self.pool.lose(event.station)
        else:
            self.pool.hear(event)

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
        self.arena.fetch(payload_id)
        return self.arena.read(payload_id)
