"""Rows per second that given batch limits would achieve: a discrete-event simulation of slots and generators.

The slots repeat their measured absences, in order, and a pass takes the time of the fitted line; so no distribution is
assumed, and long tails, slow env batches and resets are included. A forecast starts from `snapshot_loop`, runs in
slices, and is plain data, so that a saved run continues in the middle of one.

Invariant: every slot is in exactly one place: away (in `returns`), waiting, or in a pass (in a batch of `passes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from polyrhythm.plugins.autobatch.timing import PassTimeModel, RunningPass, SlotTiming
from polyrhythm.scheduler.inference.batching import Waiting, due_from, has_place, padded
from polyrhythm.scheduler.settings import BatchLimits

#: Seconds from the start of the forecast; the present is 0.
Seconds = float
#: Number of a slot of the loop, from 0.
SlotIndex = int
#: The slots that one pass answers.
Slots = tuple[SlotIndex, ...]


@dataclass(slots=True)
class ClosedLoop:
    """Slots, generators and their times, in their present state.

    rows: of each slot's request. absences_s: of each slot, seconds between an answer and the next request, oldest
    first. A pass of n rows, padded to the next of `buckets`, takes base_s + per_row_s · n seconds on any generator.
    waiting: arrival (0 or earlier) and slot of each waiting request, oldest first. returns: time of the next request of
    each absent slot. passes: end and slots of each current pass.
    """

    rows: list[int]
    absences_s: list[list[float]]
    generators: int
    base_s: float
    per_row_s: float
    buckets: tuple[int, ...] = ()
    waiting: list[tuple[Seconds, SlotIndex]] = field(default_factory=list)
    returns: list[tuple[Seconds, SlotIndex]] = field(default_factory=list)
    passes: list[tuple[Seconds, Slots]] = field(default_factory=list)


@dataclass(slots=True)
class Forecast:
    """One simulation of `loop` under `limits`; `rate` is its result, 0 until it has ended.

    warm_up, total: answered requests at which counting rows begins, and at which the simulation ends. together: all
    slots send a request at time 0, instead of the present state. rate: rows per second between warm_up and total. now:
    simulated seconds. idle: generators without a pass. absences_used: of each slot. answered, answered_rows: so far;
    counted_from, rows_before: time and answered rows at the end of the warm-up (-1 before). waiting: requests by
    arrival, of which the first `taken` are served already; waiting_rows: of the others. returns, passes: as in
    ClosedLoop, as heaps.
    """

    loop: ClosedLoop
    limits: BatchLimits
    warm_up: int
    total: int
    together: bool
    rate: float = 0.0
    now: float = 0.0
    idle: int = 0
    absences_used: list[int] = field(default_factory=list)
    answered: int = 0
    answered_rows: int = 0
    counted_from: float = -1.0
    rows_before: int = 0
    waiting: list[tuple[Seconds, SlotIndex]] = field(default_factory=list)
    taken: int = 0
    waiting_rows: int = 0
    returns: list[tuple[Seconds, SlotIndex]] = field(default_factory=list)
    passes: list[tuple[Seconds, Slots]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.absences_used:
            return  # decoded from a saved run, in the middle
        loop, slots = self.loop, len(self.loop.rows)
        self.absences_used = [0] * slots
        if self.together:
            self.returns = [(0.0, slot) for slot in range(slots)]
        else:
            self.waiting, self.returns, self.passes = list(loop.waiting), list(loop.returns), list(loop.passes)
            heapify(self.returns)
            heapify(self.passes)
        self.waiting_rows = sum(loop.rows[slot] for _, slot in self.waiting)
        self.idle = loop.generators - len(self.passes)

    def advance(self, requests: int) -> int:
        """Simulate about `requests` more answered requests, or to the end; returns their number."""
        returns, passes, slot_rows = self.returns, self.passes, self.loop.rows
        before = self.answered
        until = min(before + requests, self.total)
        while self.answered < until:
            start = self._next_start()
            pass_end = passes[0][0] if passes else math.inf
            slot_return = returns[0][0] if returns else math.inf
            # One event at a time, as requests arrive: a batch that is due does not wait for others of the same instant.
            if start <= self.now or (start < pass_end and start < slot_return):
                self.now = max(self.now, start)
                self._start_pass()
            elif pass_end <= slot_return:
                self._end_pass()
            else:
                self.now, slot = request = heappop(returns)
                self.waiting.append(request)
                self.waiting_rows += slot_rows[slot]
        if self.answered >= self.total:
            self.rate = (self.answered_rows - self.rows_before) / max(self.now - self.counted_from, 1e-9)
        return self.answered - before

    def _next_start(self) -> float:
        count = len(self.waiting) - self.taken
        if not self.idle or not count:
            return math.inf
        complete = count == len(self.absences_used)
        return due_from(Waiting(count, self.waiting_rows, self.waiting[self.taken][0], complete), self.limits)

    def _start_pass(self) -> None:
        loop, limits = self.loop, self.limits
        batch: list[SlotIndex] = []
        rows = 0
        for _, slot in self.waiting[self.taken : self.taken + limits.max_requests]:
            if not has_place(rows, loop.rows[slot], limits.max_rows):
                break
            batch.append(slot)
            rows += loop.rows[slot]
        self.taken += len(batch)
        self.waiting_rows -= rows
        if self.taken == len(self.waiting):
            self.waiting, self.taken = [], 0
        self.idle -= 1
        seconds = loop.base_s + loop.per_row_s * padded(rows, loop.buckets)
        heappush(self.passes, (self.now + seconds, tuple(batch)))

    def _end_pass(self) -> None:
        """End the earliest pass: its slots begin their next absences."""
        self.now, batch = heappop(self.passes)
        self.idle += 1
        loop, used = self.loop, self.absences_used
        for slot in batch:
            absences = loop.absences_s[slot]
            heappush(self.returns, (self.now + absences[used[slot] % len(absences)], slot))
            used[slot] += 1
            self.answered_rows += loop.rows[slot]
        self.answered += len(batch)
        if self.counted_from < 0 and self.answered >= self.warm_up:
            self.counted_from, self.rows_before = self.now, self.answered_rows


def select_group(
    slots: Mapping[str, SlotTiming], generators: int, *, shared: bool
) -> tuple[dict[str, SlotTiming], int]:
    """The slots that a forecast covers, and the number of generators that serve all of them.

    All of them, if any generator serves any slot. If slots are bound to generators, by the routing (not `shared`) or by
    their sharding, only the generator with the most bound rows, with those slots and its share (one in `generators`) of
    the unbound slots.
    """
    unbound = [name for name, slot in slots.items() if not slot.generator]
    if shared and len(unbound) == len(slots):
        return dict(slots), generators
    bound_rows: dict[str, int] = {}
    for slot in slots.values():
        if slot.generator:
            bound_rows[slot.generator] = bound_rows.get(slot.generator, 0) + slot.max_rows
    busiest = max(bound_rows, key=bound_rows.__getitem__, default="")
    share = set(unbound[::generators])
    own = {name: slot for name, slot in slots.items() if name in share or (busiest and slot.generator == busiest)}
    return own, 1


def snapshot_loop(
    slots: Mapping[str, SlotTiming],
    generators: int,
    running: Iterable[RunningPass],
    pass_time: PassTimeModel,
    buckets: tuple[int, ...],
    now: float,
) -> ClosedLoop:
    """The closed loop of these slots and generators, with `now` as time 0. running: all current passes."""
    index = {name: number for number, name in enumerate(slots)}
    loop = ClosedLoop(
        rows=[slot.rows for slot in slots.values()],
        absences_s=[slot.list_absences() for slot in slots.values()],
        generators=generators,
        base_s=pass_time.base_s,
        per_row_s=pass_time.per_row_s,
        buckets=buckets,
    )
    in_pass: set[int] = set()
    of_group = [one for one in running if any(slot in index for slot in one.slots)]
    for one in of_group[:generators]:
        batch = tuple(index[slot] for slot in one.slots if slot in index)
        end = one.started + pass_time.predict(padded(one.rows, buckets))
        loop.passes.append((max(0.0, end - now), batch))
        in_pass.update(batch)
    for number, slot in enumerate(slots.values()):
        if slot.is_away:
            loop.returns.append((max(0.0, slot.predict_return() - now), number))
        elif number not in in_pass:
            loop.waiting.append((slot.since - now, number))
    loop.waiting.sort()
    return loop
