"""Functions that settings of the recorded traces and runs name."""

from __future__ import annotations

from polyrhythm.scheduler.records import Request
from polyrhythm.specs import SampleView


def fewest_rows(request: Request) -> tuple[int, float]:
    """`queue_key`: small requests first, then by arrival."""
    return request.rows, request.arrived


def by_seed(sample: SampleView) -> float:
    """`scoring.function`."""
    return float(sample.seed % 7)
