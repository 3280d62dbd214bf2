"""Virtual time: a clock that runs scheduled calls, earliest first, and time integrals of levels.

Calls at equal times run in scheduling order. For utilisation see `observe`.

Invariant: every change of a level is recorded when it happens; nothing is inferred from counts.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Any

from polyrhythm.observe.activity import Utilisation


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
        self.at(self.now + delay, call, argument)

    @property
    def upcoming(self) -> float:
        """Time of the next scheduled call; infinite if there is none."""
        return self._heap[0][0] if self._heap else inf

    def advance(self) -> None:
        time, _, call, argument = heappop(self._heap)
        self.now = max(self.now, time)
        call(argument)


class Level:
    """A number that changes at known times, with its time integral ∫ level dt and the time with a positive level."""

    __slots__ = ("_present", "_since", "_total", "level")

    def __init__(self) -> None:
        self.level = 0
        self._since = self._total = self._present = 0.0

    def add(self, now: float, delta: int) -> None:
        self._total, self._present = self.integral(now), self.present(now)
        self._since = now
        self.level += delta

    def integral(self, now: float) -> float:
        return self._total + self.level * (now - self._since)

    def present(self, now: float) -> float:
        """∫ [level > 0] dt."""
        return self._present + (self.level > 0) * (now - self._since)


class Busy:
    """Utilisation (guarantee 9) over all stations of one kind; dead stations are not counted."""

    __slots__ = ("begin", "end", "meter", "slots")

    def __init__(self) -> None:
        self.meter = Utilisation(0.0, 0)
        self.begin, self.end = self.meter.begin, self.meter.end
        self.slots = 0

    def join(self, now: float, slots: int) -> None:
        self.slots += slots
        self.meter.offer(now, self.slots)

    def leave(self, now: float, slots: int, active: int) -> None:
        """Remove a station that died, with its `active` pieces of work."""
        if active:
            self.meter.end(now, active)
        self.join(now, -slots)
