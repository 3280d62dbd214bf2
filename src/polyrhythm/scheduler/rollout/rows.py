"""Rows, slots and env batches: which row holds a ticket, which row waits for one.

A row that joins, ends or parks waits for a ticket, first come, first served. Rows of an env batch without `reset_rows`
wait together, once all of them are free.

Invariant: a row is running (it holds a ticket), parked in mid-episode, or free; a slot is live while one of its rows
runs; every free or parked row of a present simulator is in `idle` (reserved: in `reserved`) exactly once, or waits for
its env batch to end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from polyrhythm.scheduler.records import EnvBatchInfo


@dataclass(slots=True)
class SlotState:
    """tickets: row (index in the env batch) → ticket number. The slot's requests are in `inference/serving`."""

    name: str
    simulator: str
    env_batch: str
    tickets: dict[int, int] = field(default_factory=dict)
    reserved: bool = False


@dataclass(slots=True)
class EnvBatchState:
    """free: rows that wait for the others to end (only without reset_rows); slot_of: row → slot name. reserved: for
    background evaluations."""

    name: str
    simulator: str
    reset_rows: bool
    slot_of: dict[int, str]
    free: list[int] = field(default_factory=list)
    reserved: bool = False


@dataclass(slots=True)
class IdleRows:
    """Rows of one env batch that wait for tickets and start together."""

    env_batch: str
    rows: list[int]
    parked: bool = False


@dataclass(slots=True)
class RowRegistry:
    """Rows of all present simulators. idle, reserved: rows waiting for tickets of training, of background evaluation.

    live: number of live slots without the reserved ones; changed: slots that became live or stopped since
    `take_changes`.
    """

    env_batches: dict[str, EnvBatchState] = field(default_factory=dict)
    slots: dict[str, SlotState] = field(default_factory=dict)
    idle: deque[IdleRows] = field(default_factory=deque)
    reserved: deque[IdleRows] = field(default_factory=deque)
    changed: dict[str, None] = field(default_factory=dict)
    live: int = 0

    def join(self, simulator: str, batches: tuple[EnvBatchInfo, ...]) -> None:
        for info in batches:
            if info.name in self.env_batches:
                raise ValueError(f"env batch {info.name!r} is hosted already; names must be unique over all simulators")
            slot_of = {row: slot.slot for slot in info.slots for row in range(slot.first, slot.first + slot.rows)}
            batch = EnvBatchState(info.name, simulator, info.reset_rows, slot_of, reserved=info.reserved)
            self.env_batches[info.name] = batch
            for slot in info.slots:
                self.slots[slot.slot] = SlotState(slot.slot, simulator, info.name, reserved=info.reserved)
            for row in slot_of:
                self._free(batch, row)

    def leave(self, simulator: str) -> list[SlotState]:
        """Remove the simulator; returns its slots."""
        gone = [slot for slot in self.slots.values() if slot.simulator == simulator]
        for slot in gone:
            del self.slots[slot.name]
            self.live -= bool(slot.tickets) and not slot.reserved
        self.env_batches = {name: batch for name, batch in self.env_batches.items() if batch.simulator != simulator}
        self.idle = deque(rows for rows in self.idle if rows.env_batch in self.env_batches)
        self.reserved = deque(rows for rows in self.reserved if rows.env_batch in self.env_batches)
        return gone

    def take_changes(self) -> list[tuple[str, bool]]:
        """Slots that became live or stopped since the last call, each with whether it is live."""
        if not self.changed:
            return []
        changes = [(name, bool(self.slots[name].tickets)) for name in self.changed if name in self.slots]
        self.changed.clear()
        return changes

    def next_idle(self, *, fresh: bool = False) -> IdleRows | None:
        """The rows that get tickets next, without removing them. fresh: prefer rows that are not parked."""
        unparked = (rows for rows in self.idle if not rows.parked) if fresh else ()
        return next(iter(unparked), self.idle[0] if self.idle else None)

    def sort_idle(self) -> None:
        """While no slot is live, order the waiting rows by place instead of by the end of their episodes.

        So the events before a barrier (an evaluation, the first part of a resumed run) do not affect which row gets
        which ticket after it.
        """
        if not self.live:
            self.idle = deque(sorted(self.idle, key=lambda rows: (rows.env_batch, rows.rows[0])))

    def occupy(self, idle: IdleRows, tickets: list[int]) -> list[tuple[SlotState, int]]:
        """Give tickets to the first of these rows; remaining rows wait again when their env batch is free."""
        batch = self.env_batches[idle.env_batch]
        queue = self._queue(batch)
        if idle is queue[0]:
            queue.popleft()
        else:
            queue.remove(idle)
        placed = []
        for row, ticket in zip(idle.rows, tickets, strict=False):
            slot = self.slots[batch.slot_of[row]]
            if not slot.tickets:
                self.live += not slot.reserved
                self.changed[slot.name] = None
            slot.tickets[row] = ticket
            placed.append((slot, row))
        batch.free.extend(idle.rows[len(tickets) :])
        return placed

    def release(self, slot: SlotState, row: int, *, parked: bool) -> None:
        """End the row's ticket; the row waits for another."""
        del slot.tickets[row]
        if not slot.tickets:
            self.live -= not slot.reserved
            self.changed[slot.name] = None
        batch = self.env_batches[slot.env_batch]
        if parked:
            self.idle.append(IdleRows(batch.name, [row], parked=True))
        else:
            self._free(batch, row)

    def _free(self, batch: EnvBatchState, row: int) -> None:
        if batch.reset_rows:
            self._queue(batch).append(IdleRows(batch.name, [row]))
            return
        batch.free.append(row)
        if len(batch.free) == len(batch.slot_of):
            self._queue(batch).append(IdleRows(batch.name, sorted(batch.free)))
            batch.free.clear()

    def _queue(self, batch: EnvBatchState) -> deque[IdleRows]:
        return self.reserved if batch.reserved else self.idle
