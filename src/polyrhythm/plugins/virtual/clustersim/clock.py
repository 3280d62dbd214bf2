"""Implements the virtual clock: a heap of scheduled calls, earliest first; equal times in scheduling order."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any


class VirtualClock:
    """A virtual clock that jumps from one scheduled call to the next."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time: float, call: Callable[[Any], None], argument: object = None) -> None:
        """Schedule `call(argument)` at `time`; a bound method and one argument keep allocation low."""
        self._count += 1
        heappush(self._heap, (time, self._count, call, argument))

    def after(self, delay: float, call: Callable[[Any], None], argument: object = None) -> None:
        """Schedule `call(argument)` `delay` seconds from now."""
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, call, argument))

    @property
    def upcoming(self) -> float:
        """Time of the next scheduled call; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> None:
        """Jump to the next scheduled call and make it."""
        time, _, call, argument = heappop(self._heap)
        self.now = max(self.now, time)
        call(argument)
