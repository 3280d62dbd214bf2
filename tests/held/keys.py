"""The order of requests that some of the traces were recorded with."""

from __future__ import annotations

from polyrhythm.scheduler.records import Request


def fewest_rows(request: Request) -> tuple[int, float]:
    """Small requests first, then by arrival."""
    return request.rows, request.arrived
