"""Shifts spans that stations of other hosts measured to main's clock.

Monotonic clocks begin when a machine is started, so those of two machines differ by any time. The hosts of a run
estimate the offsets (`runtime.hosts.Hosts.offset_of`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from polyrhythm.runtime.messages import Spans

log = logging.getLogger(__name__)


class ClockOffset(NamedTuple):
    """A host's monotonic clock is ahead_s ahead of main's (negative: behind), ± uncertainty_s."""

    ahead_s: float
    uncertainty_s: float

    def __str__(self) -> str:
        where = "ahead of" if self.ahead_s >= 0 else "behind"
        return f"{abs(self.ahead_s):.6f} s {where} main's, ± {1000 * self.uncertainty_s:.2g} ms"


SAME = ClockOffset(0.0, 0.0)


class SpanAlignment:
    """offset_of: the offset of a host's clock, None while it is unknown. used: the offset of each host by which its
    last spans were shifted."""

    def __init__(self, offset_of: Callable[[str], ClockOffset | None]) -> None:
        self._offset_of = offset_of
        self.used: dict[str, ClockOffset] = {}
        self._unknown: set[str] = set()

    def align(self, spans: Spans, host: str) -> tuple[Spans, float]:
        """The spans by main's clock, and the bound of the error in seconds; none of them while the offset of the host
        is unknown, which is logged once."""
        offset = self._offset_of(host)
        if offset is SAME:
            return spans, 0.0
        if offset is None:
            if host not in self._unknown:
                self._unknown.add(host)
                log.warning(
                    "host %s has not said what its clock shows: what its stations do is missing in the timeline until "
                    "it has",
                    host,
                )
            return replace(spans, spans=(), lost=0), 0.0
        self.used[host] = offset
        moved = (
            span._replace(begin=span.begin - offset.ahead_s, end=span.end - offset.ahead_s) for span in spans.spans
        )
        return replace(spans, spans=tuple(moved)), offset.uncertainty_s
