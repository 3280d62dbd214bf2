"""The batch limits that a search compares: a grid of requests per batch and longest waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings

#: Longest waits of the grid, in cycles of a slot (its absence and a pass). The last one is longer than a cycle, so that
#: all slots that were served together can come back; no wait is unlimited, so a slot that hangs cannot stop the others.
WAIT_CYCLES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.25)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place in the grid: requests per batch, and the index of its wait in WAIT_CYCLES."""

    requests: int
    wait: int


#: Stands for limits that are in no grid: those of the start, or those whose wait belongs to another length of cycle.
OFF_GRID = Candidate(0, 0)


def build_grid(
    slot_rows: Sequence[int], generators: int, settings: SchedulerSettings, cycle_s: float
) -> dict[Candidate, BatchLimits]:
    """All candidates with their limits. slot_rows: of full slots; cycle_s: seconds of a slot's absence and a pass.

    Requests per batch: of all S slots the whole, three quarters (all but the stragglers), a half and a quarter;
    S / (G + 1), S / G and S / 2G with G generators; and as many full slots as fill max_rows or a bucket. Sizes are
    counted in requests, not in rows: a slot lacks a row while that row has no episode, and a batch that
    waited for that one row would wait for a whole further slot.
    """
    slots, largest = len(slot_rows), max(slot_rows)
    parts = (1, 2, 4, generators, generators + 1, 2 * generators)
    sizes = {_divide_up(slots, part) for part in parts} | {_divide_up(3 * slots, 4)}
    sizes |= {max(1, rows // largest) for rows in (settings.max_rows, *settings.buckets)}
    sizes = {min(size, slots, settings.max_requests) for size in sizes}
    return {
        Candidate(size, wait): BatchLimits(min(settings.max_rows, size * largest), size, WAIT_CYCLES[wait] * cycle_s)
        for size in sorted(sizes)
        for wait in reversed(range(len(WAIT_CYCLES)))
    }


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
