"""The batching rule: when waiting requests become a batch, in a run, in the cluster simulation and in forecasts.

`dynamic`: a batch for a generator is due when max_rows rows or max_requests requests that it may serve wait, when the
oldest has waited max_wait_s, or, with fire_when_all_wait, when every live slot that it may serve waits, so that nothing
more can come. The wait counts from the arrival of the oldest request, not from when the generator becomes idle. `auto`:
the same, with max_rows and max_wait_s adapted during the run (`plugins/autobatch`). `lockstep`: all batches are due at
once, when every live slot waits and every generator is free.

`dynamic` also queues a batch behind a pass, at a generator of depth 2, which gathers it meanwhile: only a full batch,
which waiting cannot make larger, and only if no idle generator can take it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from polyrhythm.scheduler.records import Request
from polyrhythm.scheduler.settings import BatchLimits


class Waiting(NamedTuple):
    """Requests that an idle generator could get. oldest: arrival of the oldest, infinite for none. complete: every live
    slot that it may serve waits."""

    requests: int
    rows: int
    oldest: float
    complete: bool


def is_due(waiting: Waiting, limits: BatchLimits, now: float) -> bool:
    """Whether an idle generator starts a batch now (`dynamic`, `auto`)."""
    return now >= due_from(waiting, limits)


def due_from(waiting: Waiting, limits: BatchLimits) -> float:
    """Time at which the batch is due if nothing else arrives: -infinity if it is due now, infinity if nothing waits."""
    requests, rows, oldest, complete = waiting
    if not requests:
        return math.inf
    if is_full(requests, rows, limits) or (complete and limits.fire_when_all_wait):
        return -math.inf
    return oldest + limits.max_wait_s


def is_full(requests: int, rows: int, limits: BatchLimits) -> bool:
    """Whether the waiting requests fill a batch."""
    return rows >= limits.max_rows or requests >= limits.max_requests


def has_place(rows: int, more: int, max_rows: int) -> bool:
    """Whether a batch of `rows` rows takes a request of `more`. An empty one takes any: requests are not split."""
    return not rows or rows + more <= max_rows


def split_evenly(requests: Sequence[Request], parts: int) -> list[tuple[Request, ...]]:
    """Consecutive shares of about equal rows, for `lockstep` over several generators. A request goes to the share in
    which its middle row falls: five requests of one row over two parts give 3 + 2."""
    total = sum(request.rows for request in requests)
    shares: list[list[Request]] = [[] for _ in range(parts)]
    before = 0
    for request in requests:
        shares[min(parts - 1, (2 * before + request.rows - 1) * parts // (2 * total))].append(request)
        before += request.rows
    return [tuple(share) for share in shares]


def powers(rows: int) -> tuple[int, ...]:
    """Powers of two from 1 up to the first that is at least `rows`."""
    return tuple(1 << power for power in range((rows - 1).bit_length() + 1))


def padded(rows: int, buckets: Sequence[int]) -> int:
    """Rows of a pass after padding to the next bucket."""
    index = bisect_left(buckets, rows)
    return buckets[index] if index < len(buckets) else rows
