"""Integrates queue lengths and waiting times over time (for utilisation see `observe`).

Invariant: every change of a level is recorded when it happens; nothing is inferred from counts.
"""

from __future__ import annotations


class Level:
    """A time integral ∫ level dt of a number that changes at known times."""

    __slots__ = ("level", "since", "total")

    def __init__(self) -> None:
        self.level = 0
        self.since = 0.0
        self.total = 0.0

    def add(self, now: float, delta: int) -> None:
        """Change the level by `delta` from `now` on."""
        self.total += self.level * (now - self.since)
        self.since = now
        self.level += delta

    def integral(self, now: float) -> float:
        """∫ level dt up to `now`."""
        return self.total + self.level * (now - self.since)


class Presence:
    """A time integral ∫ [level > 0] dt: how long there was at least one."""

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
    """Seconds per state, summed over items of which each is in one state at a time."""

    __slots__ = ("seconds",)

    def __init__(self, *states: str) -> None:
        self.seconds = dict.fromkeys(states, 0.0)

    def add(self, state: str, seconds: float) -> None:
        self.seconds[state] += seconds
