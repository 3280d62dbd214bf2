"""Virtual time: a clock that runs scheduled calls, earliest first, and time integrals of levels and states.

Calls at equal times run in scheduling order. For utilisation see `observe`.

Invariant: every change of a level is recorded when it happens; nothing is inferred from counts.
"""

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
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, call, argument))

    @property
    def upcoming(self) -> float:
        """Time of the next scheduled call; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> None:
        time, _, call, argument = heappop(self._heap)
        self.now = max(self.now, time)
        call(argument)


class Level:
    """A time integral ∫ level dt of a number that changes at known times."""

    __slots__ = ("level", "since", "total")

    def __init__(self) -> None:
        self.level = 0
        self.since = 0.0
        self.total = 0.0

    def add(self, now: float, delta: int) -> None:
        self.total += self.level * (now - self.since)
        self.since = now
        self.level += delta

    def integral(self, now: float) -> float:
        return self.total + self.level * (now - self.since)


class Presence:
    """A time integral ∫ [level > 0] dt: time with a positive level."""

    __slots__ = ("_count", "_some")

    def __init__(self) -> None:
        self._count = 0
        self._some = Level()

    def add(self, now: float, delta: int) -> None:
        before, self._count = self._count, self._count + delta
        self._some.add(now, (self._count > 0) - (before > 0))

    def integral(self, now: float) -> float:
        return self._some.integral(now)


class Causes:
    """Seconds per state, summed over items that are each in one state at a time."""

    __slots__ = ("seconds",)

    def __init__(self, *states: str) -> None:
        self.seconds = dict.fromkeys(states, 0.0)

    def add(self, state: str, seconds: float) -> None:
        self.seconds[state] += seconds
