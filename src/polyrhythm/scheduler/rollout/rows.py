"""Rows, slots and env batches: who holds a ticket, who asks for one.

A row that joins, ends or parks asks for a ticket. Rows of an env batch without `reset_rows` ask together,
once all of them are free. Asking is first come, first served.

Invariant: a row is running (it holds a ticket), parked in mid-episode, or free; a slot is live while one of its rows
runs; every free or parked row of a present simulator is in `asks` (reserved: in `reserved`) exactly once, or waits for
its env batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from polyrhythm.scheduler.records import EnvBatchInfo, Request


@dataclass(slots=True)
class SlotState:
    """tickets: row (index in the env batch) → ticket number; request: the one waiting or being served.

    asked: the last one heard; answered_by: the generator that said it had answered that.
    """

    name: str
    simulator: str
    env_batch: str
    ordinal: int
    generator: str | None
    tickets: dict[int, int] = field(default_factory=dict)
    request: Request | None = None
    asked: Request | None = None
    answered_by: str = ""
    reserved: bool = False


@dataclass(slots=True)
class EnvBatchState:
    """free: rows that wait for the others to end (only without reset_rows); slot_of: row → slot name; reserved: for
    evaluations beside training."""

    name: str
    simulator: str
    reset_rows: bool
    slot_of: dict[int, str]
    free: list[int] = field(default_factory=list)
    reserved: bool = False


@dataclass(slots=True)
class IdleRows:
    """Rows of one env batch that ask for tickets, all to be started together."""

    env_batch: str
    rows: list[int]
    parked: bool = False


@dataclass(slots=True)
class RowRegistry:
    """All rows of all present simulators.

    asks, reserved: who asks for tickets, of the rows of training and of the reserved ones. live: how many slots are,
    without the reserved ones; quieted: slots that stopped being live since the conductor last looked; ordinals: slot →
    its number, which it keeps when its simulator leaves and comes back.
    """

    env_batches: dict[str, EnvBatchState] = field(default_factory=dict)
    slots: dict[str, SlotState] = field(default_factory=dict)
    asks: deque[IdleRows] = field(default_factory=deque)
    reserved: deque[IdleRows] = field(default_factory=deque)
    quieted: list[str] = field(default_factory=list)
    live: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)

    def join(self, simulator: str, batches: tuple[EnvBatchInfo, ...]) -> None:
        for info in batches:
            if info.name in self.env_batches:
                raise ValueError(f"env batch {info.name!r} is hosted already; names must be unique over all simulators")
            slot_of = {row: slot.slot for slot in info.slots for row in range(slot.first, slot.first + slot.rows)}
            batch = EnvBatchState(info.name, simulator, info.reset_rows, slot_of, reserved=info.reserved)
            self.env_batches[info.name] = batch
            for slot in info.slots:
                ordinal = -1 if info.reserved else self.ordinals.setdefault(slot.slot, len(self.ordinals))
                self.slots[slot.slot] = SlotState(
                    slot.slot, simulator, info.name, ordinal, slot.generator, reserved=info.reserved
                )
            for row in slot_of:
                self._free(batch, row)

    def leave(self, simulator: str) -> list[SlotState]:
        """Forget the simulator; its slots are returned as they were."""
        gone = [slot for slot in self.slots.values() if slot.simulator == simulator]
        for slot in gone:
            del self.slots[slot.name]
            self.live -= bool(slot.tickets) and not slot.reserved
        self.env_batches = {name: batch for name, batch in self.env_batches.items() if batch.simulator != simulator}
        self.asks = deque(ask for ask in self.asks if ask.env_batch in self.env_batches)
        self.reserved = deque(ask for ask in self.reserved if ask.env_batch in self.env_batches)
        return gone

    def next_ask(self, *, fresh: bool = False) -> IdleRows | None:
        """The ask to serve next, left in place. fresh: prefer one that is not parked in mid-episode."""
        unparked = (ask for ask in self.asks if not ask.parked) if fresh else ()
        return next(iter(unparked), self.asks[0] if self.asks else None)

    def tidy(self) -> None:
        """While nothing runs, let rows ask in an order of their own, not in that in which their episodes ended.

        So what happened before a barrier (an evaluation, a resumed run's first part) does not decide who gets which
        ticket behind it.
        """
        if not self.live:
            self.asks = deque(sorted(self.asks, key=lambda ask: (ask.env_batch, ask.rows[0])))

    def occupy(self, ask: IdleRows, tickets: list[int]) -> list[tuple[SlotState, int]]:
        """Give the first rows of `ask` these tickets; rows left over ask again when their env batch is free."""
        batch = self.env_batches[ask.env_batch]
        asks = self._asks(batch)
        if ask is asks[0]:
            asks.popleft()
        else:
            asks.remove(ask)
        placed = []
        for row, ticket in zip(ask.rows, tickets, strict=False):
            slot = self.slots[batch.slot_of[row]]
            self.live += not slot.tickets and not slot.reserved
            slot.tickets[row] = ticket
            placed.append((slot, row))
        batch.free.extend(ask.rows[len(tickets) :])
        return placed

    def vacate(self, slot: SlotState, row: int, *, parked: bool) -> None:
        """The row's ticket is over; it asks for another."""
        del slot.tickets[row]
        if not slot.tickets:
            self.live -= not slot.reserved
            self.quieted.append(slot.name)
        batch = self.env_batches[slot.env_batch]
        if parked:
            self.asks.append(IdleRows(batch.name, [row], parked=True))
        else:
            self._free(batch, row)

    def _free(self, batch: EnvBatchState, row: int) -> None:
        if batch.reset_rows:
            self._asks(batch).append(IdleRows(batch.name, [row]))
            return
        batch.free.append(row)
        if len(batch.free) == len(batch.slot_of):
            self._asks(batch).append(IdleRows(batch.name, sorted(batch.free)))
            batch.free.clear()

    def _asks(self, batch: EnvBatchState) -> deque[IdleRows]:
        return self.reserved if batch.reserved else self.asks
