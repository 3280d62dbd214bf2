"""What a batching rule would achieve: a small closed loop of slots and generators, played on a clock of its own.

Each slot plays back the times that it was really away between an answer and its next request; a pass takes what the
learned law says. So it forecasts this cluster, not one of some family of laws. It runs in slices of as much work as its
owner allows, and all of it is plain data, so that a saved conductor goes on in the middle of one.

Invariant: a slot is away (its return stands in `calls`), waits, or is in a pass (whose end stands there).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from polyrhythm.scheduler.padding import padded
from polyrhythm.scheduler.settings import BatchLimits

#: A pass's end, in the place of a slot's index: before the returns of the same instant.
PASS = -1


#: Limits under which a forecast is played.
ForecastLimits = BatchLimits


@dataclass(slots=True)
class ClosedLoop:
    """What is forecast from. rows: of each slot's request; away: seconds between an answer and the next request of each
    slot, as they were; a pass of n rows, padded to a bucket, takes base + per_row·n seconds on any of `generators`.

    waiting, calls: how things stand, with the present as time 0 (see `Forecast`).
    """

    rows: list[int]
    away: list[list[float]]
    generators: int
    base: float
    per_row: float
    waiting: list[tuple[float, int]]
    calls: list[tuple[float, int, tuple[int, ...]]]
    buckets: tuple[int, ...] = ()


@dataclass(slots=True)
class Forecast:
    """One play of `loop` under `limits`, from how things stand, or with all slots asking at once (together).

    settling: requests answered before the count begins; wanted: requests answered when it ends. rate: rows per second,
    once it has. waiting: arrivals and slots, the first `taken` of which are served; calls: heap of what happens when:
    a slot returns, or a pass of some slots ends.
    """

    loop: ClosedLoop
    limits: ForecastLimits
    settling: int
    wanted: int
    together: bool
    now: float = 0.0
    idle: int = 0
    answered: int = 0
    rows: int = 0
    since: float = -1.0
    rows_since: int = 0
    rate: float = 0.0
    calls: list[tuple[float, int, tuple[int, ...]]] = field(default_factory=list)
    waiting: list[tuple[float, int]] = field(default_factory=list)
    taken: int = 0
    rows_waiting: int = 0
    turns: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.turns:
            return  # decoded
        loop, slots = self.loop, len(self.loop.rows)
        self.turns = [0] * slots
        if self.together:
            self.calls = [(0.0, slot, ()) for slot in range(slots)]
        else:
            self.waiting, self.calls = list(loop.waiting), list(loop.calls)
            heapify(self.calls)
        self.rows_waiting = sum(loop.rows[slot] for _, slot in self.waiting)
        self.idle = loop.generators - sum(slot == PASS for _, slot, _ in self.calls)

    def run(self, work: int) -> int:
        """Go on until about `work` requests more are answered or the forecast stands (`rate` above 0); how many are."""
        loop, calls, turns, before = self.loop, self.calls, self.turns, self.answered
        until = min(before + work, self.wanted)
        while self.answered < until:
            due = self._due()
            # One by one, as requests come: a batch that is due does not wait for others of the same instant.
            if due > self.now and calls and calls[0][0] <= due:
                self.now, slot, batch = heappop(calls)
                if slot != PASS:
                    self.waiting.append((self.now, slot))
                    self.rows_waiting += loop.rows[slot]
                    continue
                self.idle += 1
                for answered in batch:
                    times, turn = loop.away[answered], turns[answered]
                    turns[answered] = turn + 1
                    self.rows += loop.rows[answered]
                    heappush(calls, (self.now + times[turn % len(times)], answered, ()))
                self.answered += len(batch)
                if self.since < 0 and self.answered >= self.settling:
                    self.since, self.rows_since = self.now, self.rows
            else:
                self.now = max(self.now, due)
                self._serve()
        if self.answered >= self.wanted:
            self.rate = (self.rows - self.rows_since) / max(self.now - self.since, 1e-9)
        return self.answered - before

    def _due(self) -> float:
        """When the next batch starts if nobody returns before."""
        count = len(self.waiting) - self.taken
        if not count or not self.idle:
            return math.inf
        limits = self.limits
        full = self.rows_waiting >= limits.max_rows or count >= limits.max_requests
        if full or count == len(self.turns):
            return -math.inf
        return self.waiting[self.taken][0] + limits.max_wait_s

    def _serve(self) -> None:
        loop, limits = self.loop, self.limits
        batch: list[int] = []
        rows = 0
        for _, slot in self.waiting[self.taken : self.taken + limits.max_requests]:
            if batch and rows + loop.rows[slot] > limits.max_rows:
                break
            batch.append(slot)
            rows += loop.rows[slot]
        self.taken += len(batch)
        self.rows_waiting -= rows
        if self.taken == len(self.waiting):
            self.waiting, self.taken = [], 0
        self.idle -= 1
        seconds = loop.base + loop.per_row * padded(rows, loop.buckets)
        heappush(self.calls, (self.now + seconds, PASS, tuple(batch)))
