"""Row counts that passes are padded to; generators and forecasts share this arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def powers(rows: int) -> tuple[int, ...]:
    """The powers of two from 1 to the first that holds so many rows."""
    return tuple(1 << power for power in range((rows - 1).bit_length() + 1))


def padded(rows: int, buckets: Sequence[int]) -> int:
    """Rows of a pass of so many, where passes are padded to the next bucket."""
    index = bisect_left(buckets, rows)
    return buckets[index] if index < len(buckets) else rows
