"""Rows, slots and env batches: how a batch is divided into slots (`shard`), which row holds a ticket or waits for one.

The slots of an env batch are consecutive, not empty, and together cover its rows exactly.

A row that joins, ends or parks waits for a ticket, first come, first served. Rows of an env batch without `reset_rows`
wait together, once all of them are free.

Invariant: a row is running (it holds a ticket), parked in mid-episode, or free; a slot is live while one of its rows
runs; every free or parked row of a present simulator is in `idle` (reserved: in `reserved`) exactly once, or waits for
its env batch to end.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from polyrhythm.scheduler.records import EnvBatchInfo, SlotInfo
from polyrhythm.scheduler.settings import load_function


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
    """free: rows that wait for the others to end (only without reset_rows); slot_of: row → slot name."""

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
    live: number of live slots without the reserved ones; changed: slots that became live or stopped, not yet taken."""

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


class EnvBatchShape(NamedTuple):
    """Argument of a user's strategy: an env batch, named `simulator.number`."""

    name: str
    rows: int


#: Instead of a generator's name: whichever is free.
ANY = "any"

#: A user's strategy: (env batch, generator names) → [(rows, generator name or "any")], slot by slot.
Strategy = Callable[[EnvBatchShape, Sequence[str]], Sequence[tuple[int, str | None]]]


class StrategyFailure(ValueError):
    """A user's strategy raised; the cause is chained."""


def shard(
    name: str, rows: int, strategy: str | Sequence[int], generators: Sequence[str], *, reset_rows: bool = True
) -> EnvBatchInfo:
    """Divide env batch `name` into slots `name/0`, `name/1`, …

    strategy: `whole`; `rows` (a slot for each); `even:n` (sizes differ by one at most, larger first); a list of sizes;
    or `module:function`. Raises ValueError with what, value and remedy.
    """
    shares = _shares(name, rows, strategy, generators)
    for size, generator in shares:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"sharding of {name}: a slot has {size!r} rows; give a whole number, 1 or more")
        if generator not in (None, ANY, *generators):
            names = ", ".join(generators)
            raise ValueError(f"sharding of {name}: there is no generator {generator!r}; there are {names}, and any")
    total = sum(size for size, _ in shares)
    if total != rows:
        raise ValueError(
            f"sharding of {name}: the slots have {total} rows together, the env batch has {rows}; make them equal"
        )
    slots, first = [], 0
    for index, (size, generator) in enumerate(shares):
        bound = None if generator == ANY else generator
        slots.append(SlotInfo(slot=f"{name}/{index}", first=first, rows=size, generator=bound))
        first += size
    return EnvBatchInfo(name=name, slots=tuple(slots), reset_rows=reset_rows)


def _shares(
    name: str, rows: int, strategy: str | Sequence[int], generators: Sequence[str]
) -> Sequence[tuple[int, str | None]]:
    if not isinstance(strategy, str):
        return [(size, None) for size in strategy]
    if strategy == "whole":
        return [(rows, None)]
    if strategy == "rows":
        return [(1, None)] * rows
    if strategy.startswith("even:"):
        count = int(strategy[5:]) if strategy[5:].isdigit() else 0
        if not 1 <= count <= rows:
            raise ValueError(
                f"sharding {strategy!r}: n must be a whole number from 1 to the {rows} rows of an env batch"
            )
        return [(rows // count + (index < rows % count), None) for index in range(count)]
    if strategy.partition(":")[2].isidentifier():
        function = cast(Strategy, load_function(strategy, "sharding"))
        try:
            result = function(EnvBatchShape(name, rows), generators)
        except Exception as error:
            raise StrategyFailure(
                f"sharding {strategy!r} raised {type(error).__name__}: {error}; fix it there"
            ) from error
        if not isinstance(result, Sequence) or not all(isinstance(one, tuple) and len(one) == 2 for one in result):
            raise ValueError(
                f"sharding {strategy!r} returned {result!r}; it must return a list of (rows, generator or 'any')"
            )
        return [(_as_whole(rows), generator) for rows, generator in result]
    raise ValueError(f"sharding {strategy!r} is unknown; use whole, rows, even:n, a list of sizes, or module:function")


def _as_whole(rows: Any) -> Any:
    """Whole numbers of other libraries as int; anything else as it is."""
    return operator.index(rows) if hasattr(rows, "__index__") and not isinstance(rows, bool) else rows
