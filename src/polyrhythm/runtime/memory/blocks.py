"""Ownership of the arena's blocks. The main process keeps it, from the commands and events that pass through it.

    free → writing (a simulator, for one attempt of a ticket) → finished (the conductor, by payload id) → free

Only the conductor frees a finished block; a failed attempt frees its own. The blocks of a lost simulator are freed by
`lose`, which must be called only after its process has ended. The arena has a block for each row and for each sample
that admission lets wait (`blocks_needed`), so no ticket ever waits for one.

While a run is saved, a reader in another thread copies the finished blocks. One that is released before its turn is
held, and is given out last: then it is copied on the spot.

Invariant: a block is in exactly one of the three states, or held; nobody reads a block any more when it is given out.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from polyrhythm.scheduler import records


def blocks_needed(
    rows: int,
    version_samples: int,
    max_lag: float,
    *,
    group_size: int = 1,
    extra_groups: int = 0,
    extra_members: int = 0,
    scored: int = 0,
) -> int:
    """Blocks of an arena: one that each row writes, and the finished samples that admission allows.

    version_samples: consumed for each version. A lent sample is ahead as well: it counts as consumed until its version
    is applied. extra_groups: these are outside admission, and of each all members but one may have finished (with the
    last one it takes the place of another). Extra members need none: a group that has enough gives up the others.

    scored: with scorers, samples that they have or that evaluations let wait for them, more than 0. Then a group has
    enough only once its members are scored, so all its members may have finished.
    """
    ahead = version_samples + math.floor(max_lag * version_samples + 1e-9)
    if not scored:
        return rows + ahead + extra_groups * (group_size - 1)
    groups = -(-ahead // group_size) + extra_groups
    return rows + scored + ahead + extra_groups * group_size + groups * extra_members


class BlockReader(Protocol):
    """Copies finished blocks in a thread of its own."""

    def is_pending(self, block: int) -> bool:
        """Whether it has yet to copy this block."""
        ...

    def copy_now(self, block: int) -> None:
        """Copy the block if it is pending; when this returns the block may be overwritten."""
        ...


class BlockPool:
    """The owners of `count` blocks."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))  # a heap: rows that start together get blocks side by side, where it can be
        self._writing: dict[tuple[int, int], tuple[int, str]] = {}
        self._finished: set[int] = set()
        self._held: deque[int] = deque()  # released, but the reader may have yet to copy them
        self._reader: BlockReader | None = None

    def assign(self, command: records.StartRows) -> records.StartRows:
        """The command with a block in each grant."""
        while self._held and len(self._free) < len(command.grants):
            self._free_held()
        assert len(self._free) >= len(command.grants), f"no free block: {self.describe()}"
        grants = tuple(replace(grant, block=heapq.heappop(self._free)) for grant in command.grants)
        for grant in grants:
            self._writing[grant.ticket.number, grant.ticket.attempt] = (grant.block, command.simulator)
        return replace(command, grants=grants)

    def hear(self, event: records.Event) -> None:
        """Update the owners after an event of a present station."""
        if isinstance(event, records.SampleFinished | records.SampleFailed):
            block, _ = self._writing.pop((event.ticket, event.attempt))
            if isinstance(event, records.SampleFinished) and event.payload_id:
                assert event.payload_id == str(block), (
                    f"sample {event.ticket} should lie in {block}, not in {event.payload_id}"
                )
                self._finished.add(block)
            else:
                heapq.heappush(self._free, block)

    def lose(self, simulator: str) -> None:
        """Free the blocks that the simulator was writing. Its process must have ended."""
        for attempt, (block, owner) in list(self._writing.items()):
            if owner == simulator:
                del self._writing[attempt]
                heapq.heappush(self._free, block)

    def release(self, payload_ids: Iterable[str]) -> None:
        """Free finished blocks. The empty payload id is an evaluation's that is not scored: its block is free."""
        for payload_id in payload_ids:
            if payload_id:
                block = int(payload_id)
                self._finished.remove(block)
                if self._reader is not None and self._reader.is_pending(block):
                    self._held.append(block)
                else:
                    heapq.heappush(self._free, block)

    def hand_over(self, reader: BlockReader) -> None:
        """Let `reader` copy the finished blocks while the run goes on. An earlier one has copied all of its own."""
        while self._held:
            self._free_held()
        self._reader = reader

    def _free_held(self) -> None:
        assert self._reader is not None, "blocks are held for a reader"
        block = self._held.popleft()
        self._reader.copy_now(block)
        heapq.heappush(self._free, block)

    def restore(self, payload_ids: Sequence[str]) -> None:
        """These blocks hold finished samples (of a resumed run)."""
        self._finished = {int(payload_id) for payload_id in payload_ids}
        self._free = sorted(set(self._free) - self._finished)

    def finished(self) -> tuple[str, ...]:
        """Payload ids of the finished samples that are not released yet."""
        return tuple(str(block) for block in sorted(self._finished))

    def describe(self) -> str:
        free = len(self._free) + len(self._held)
        return f"{free} blocks free, {len(self._writing)} being written, {len(self._finished)} finished"
