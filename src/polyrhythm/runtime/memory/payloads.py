"""The contract of where samples live: a block for each attempt, named by a payload id, until it is released.

    put, or written by a simulator  →  read in place, by anybody who shares the memory  →  released

A payload id is `block` for a block of this host, or `host/block`. `ArenaPayloads` knows one host and refuses to read
others' blocks; `plugins.cluster.hosts.directory` fetches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.in_flight import InFlight
from polyrhythm.scheduler import records
from polyrhythm.specs import Trajectory


class Payloads(Protocol):
    """The samples of one run, as the main process sees them. arena: the memory that they lie in; in_flight: who
    owns which block.

    Invariant: a block that was assigned or that holds a finished sample is not assigned again before it is free.
    """

    layout: ArenaLayout
    arena: Arena
    in_flight: InFlight

    def assign(self, command: records.StartRows) -> records.StartRows:
        """The command with a block in each grant."""
        ...

    def on_event(self, event: records.Event) -> None:
        """An event is passed on to the conductor: a sample is finished or failed, or a station that wrote is gone."""
        ...

    def take_lost(self) -> records.PayloadsLost | None:
        """Finished samples that nobody can read any more, which the conductor has not been told of; asked before every
        event."""
        ...

    def locate(self, payload_ids: Sequence[str]) -> tuple[str, ...]:
        """The same payloads by the names that stations of any host know."""
        ...

    def put(self, payload_id: str, trajectory: Trajectory) -> None:
        """Write a finished sample into the block, as it was read from another."""
        ...

    def read(self, payload_id: str) -> Trajectory:
        """The finished sample, in place: valid until it is released. LookupError: it does not lie here."""
        ...

    def release(self, payload_ids: Iterable[str]) -> None:
        """These samples are not needed any more; KeyError if one is not finished."""
        ...


class ArenaPayloads:
    """Payloads in the blocks of one arena in `memory`, which every station of this host shares."""

    def __init__(self, in_flight: InFlight, memory: memoryview | bytearray) -> None:
        self.layout, self.in_flight, self.arena = in_flight.layout, in_flight, Arena(in_flight.layout, memory)
        self.assign, self.release = self.in_flight.assign, self.in_flight.release
        self.on_event = self.in_flight.on_event

    @classmethod
    def in_memory(cls, layout: ArenaLayout) -> ArenaPayloads:
        """In this process's own memory."""
        return cls(InFlight(layout), bytearray(layout.nbytes))

    def take_lost(self) -> None:
        return None

    def locate(self, payload_ids: Sequence[str]) -> tuple[str, ...]:
        return tuple(payload_ids)

    def put(self, payload_id: str, trajectory: Trajectory) -> None:
        self.arena.store(self.arena.block_of(payload_id), trajectory)

    def read(self, payload_id: str) -> Trajectory:
        return self.arena.read(payload_id)
