"""The queue of waiting requests.

Requests wait in pools: one for requests that any generator may serve, one per generator that slots are bound to. Among
the requests that a generator may serve, the lowest key goes first (arrival time, or the user's key function).

Invariant: a slot has at most one request here; `rows` and `count` are sums over the waiting requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import has_place
from polyrhythm.scheduler.records import Request
from polyrhythm.scheduler.settings import SchedulerSettings, load_function

Key = Callable[[Request], Any]

#: Pool of the requests that any generator may serve.
ANY = ""


#: Stale entries that a heap may hold in addition to as many as there are waiting entries.
_SLACK = 64


def by_arrival(request: Request) -> float:
    return request.arrived


def load_key(settings: SchedulerSettings) -> Key:
    """The function named by `queue_key`; by default arrival time."""
    return cast(Key, load_function(settings.queue_key, "queue_key")) if settings.queue_key else by_arrival


@dataclass(slots=True)
class Pool:
    """Waiting requests of one pool: heaps by key and by arrival, whose stale entries are dropped when they surface.
    keyed: the key is not the arrival time; otherwise `by_key` stays empty."""

    keyed: bool = False
    rows: int = 0
    waiting: dict[int, Request] = field(default_factory=dict)
    by_key: list[tuple[Any, int]] = field(default_factory=list)
    by_arrival: list[tuple[float, int]] = field(default_factory=list)

    def push(self, order: int, key: Any, request: Request) -> None:
        self.waiting[order] = request
        self.rows += request.rows
        heapq.heappush(self.by_arrival, (request.arrived, order))
        if self.keyed:
            heapq.heappush(self.by_key, (key, order))

    def head(self) -> tuple[Any, int]:
        """Key and order of the request to serve next; IndexError when empty."""
        heap = self.by_key if self.keyed else self.by_arrival
        while heap and heap[0][1] not in self.waiting:
            heapq.heappop(heap)
        return heap[0]

    def oldest(self) -> float:
        """Arrival of the oldest request; infinite when empty."""
        while self.by_arrival and self.by_arrival[0][1] not in self.waiting:
            heapq.heappop(self.by_arrival)
        return self.by_arrival[0][0] if self.by_arrival else float("inf")

    def remove(self, order: int) -> Request:
        request = self.waiting.pop(order)
        self.rows -= request.rows
        if len(self.by_arrival) > 2 * len(self.waiting) + _SLACK:
            # Stale entries of an unused heap never surface.
            self.by_key = [entry for entry in self.by_key if entry[1] in self.waiting]
            self.by_arrival = [entry for entry in self.by_arrival if entry[1] in self.waiting]
            heapq.heapify(self.by_key)
            heapq.heapify(self.by_arrival)
        return request


@dataclass(slots=True)
class RequestQueue:
    """bound: generators that waiting requests are bound to; orders: slot → (pool, number of its push). pushed: numbers
    the pushes, so that equal keys keep their order."""

    key: Key = field(default=by_arrival, metadata=UNSAVED)
    pools: dict[str, Pool] = field(default_factory=dict)
    bound: dict[str, None] = field(default_factory=dict)
    orders: dict[str, tuple[str, int]] = field(default_factory=dict)
    pushed: int = 0

    def __len__(self) -> int:
        return len(self.orders)

    def push(self, request: Request, pool: str) -> None:
        """Queue the request in `pool`. Pushing it again after a failure keeps its arrival time."""
        assert request.slot not in self.orders, f"slot {request.slot} waits already"
        self.pushed += 1
        self.orders[request.slot] = (pool, self.pushed)
        if pool not in self.pools:
            self.pools[pool] = Pool(keyed=self.key is not by_arrival)
        self.pools[pool].push(self.pushed, self.key(request), request)
        if pool != ANY:
            self.bound[pool] = None

    def remove(self, slot: str) -> Request | None:
        """Remove the slot's request and return it; None if none waits."""
        if slot not in self.orders:
            return None
        name, order = self.orders.pop(slot)
        pool = self.pools[name]
        request = pool.remove(order)
        if not pool.waiting:
            self.bound.pop(name, None)
        return request

    def view(self, names: Sequence[str]) -> tuple[int, int, float]:
        """Over the named pools: (requests, rows, arrival of the oldest)."""
        requests, rows, oldest = 0, 0, float("inf")
        for name in names:
            pool = self.pools.get(name)
            if pool is not None and pool.waiting:
                requests += len(pool.waiting)
                rows += pool.rows
                oldest = min(oldest, pool.oldest())
        return requests, rows, oldest

    def peek(self, names: Sequence[str]) -> Request | None:
        pools = [self.pools[name] for name in names if name in self.pools and self.pools[name].waiting]
        if not pools:
            return None
        pool = min(pools, key=Pool.head)
        return pool.waiting[pool.head()[1]]

    def take(self, names: Sequence[str], max_rows: int, max_requests: int) -> tuple[Request, ...]:
        """Remove the next batch from the named pools, in key order. It ends before the first request that does not fit
        (`has_place`), and is empty only if nothing waits."""
        taken: list[Request] = []
        rows = 0
        pools = [self.pools[name] for name in names if name in self.pools and self.pools[name].waiting]
        while pools and len(taken) < max_requests:
            pool = pools[0] if len(pools) == 1 else min(pools, key=Pool.head)
            _, order = pool.head()
            if not has_place(rows, pool.waiting[order].rows, max_rows):
                break
            request = pool.remove(order)
            taken.append(request)
            rows += request.rows
            name, _ = self.orders.pop(request.slot)
            if not pool.waiting:
                self.bound.pop(name, None)
                pools = [other for other in pools if other.waiting]
        return tuple(taken)

    def move_all(self, source: str, target: str) -> None:
        pool = self.pools.get(source)
        for request in list(pool.waiting.values()) if pool else ():
            self.remove(request.slot)
            self.push(request, target)
