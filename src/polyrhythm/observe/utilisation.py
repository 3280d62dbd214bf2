"""Measures the utilisation of a station: ∫min(active, slots)dt / ∫slots dt (guarantee 9)."""

from __future__ import annotations


class Utilisation:
    """An accumulator of busy time; it reads no clock, each change comes with its time, which never decreases.

    slots: work items that the station can process at once (0 while it is away); active: items that it has.
    Example: one slot, one piece from 0 s to 3 s, read at 4 s: 3/4.
    """

    __slots__ = ("_active", "_busy_s", "_now", "_offered_s", "_slots")

    def __init__(self, now: float, slots: int = 1) -> None:
        self._now = now
        self._slots = slots
        self._active = 0
        self._busy_s = 0.0
        self._offered_s = 0.0

    @property
    def active(self) -> int:
        """Work items of the station, some of which may be waiting for a slot."""
        return self._active

    def begin(self, now: float, pieces: int = 1) -> None:
        """Record that work arrived."""
        self._advance(now)
        self._active += pieces

    def end(self, now: float, pieces: int = 1) -> None:
        """Record that work is done."""
        self._advance(now)
        assert self._active >= pieces, f"{pieces} pieces ended, {self._active} were active"
        self._active -= pieces

    def offer(self, now: float, slots: int) -> None:
        """Change the number of slots; 0 when the station is lost, and its active work with it."""
        self._advance(now)
        self._slots = slots
        if slots == 0:
            self._active = 0

    def busy_s(self, now: float) -> float:
        """∫min(active, slots)dt up to now, in slot-seconds."""
        self._advance(now)
        return self._busy_s

    def value(self, now: float) -> float:
        """Utilisation from the start to now, in 0..1; 0 before any time has passed."""
        self._advance(now)
        return self._busy_s / self._offered_s if self._offered_s > 0 else 0.0

    def _advance(self, now: float) -> None:
        assert now >= self._now, f"time ran backwards: {self._now} → {now}"
        elapsed, self._now = now - self._now, now
        self._busy_s += min(self._active, self._slots) * elapsed
        self._offered_s += self._slots * elapsed
