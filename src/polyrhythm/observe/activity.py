"""Utilisation and rates of stations: recent ones from cumulative counters, and of one station over its whole time,
∫min(active, slots)dt / ∫slots dt (guarantee 9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class Activity:
    """A sliding window over cumulative counters; it reads no clock, each snapshot has its time.

    Example: a station with `busy_s` 3.0 at 10 s and 7.5 at 16 s was busy for 75% of the time between.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._snapshots: deque[tuple[float, dict[str, dict[str, float]]]] = deque()

    def take(self, now: float, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Add a snapshot of each station's counters; of those older than the window keep only the latest."""
        self._snapshots.append((now, {station: dict(counts) for station, counts in counters.items()}))
        while len(self._snapshots) > 2 and self._snapshots[1][0] <= now - self._window_s:
            self._snapshots.popleft()

    def utilisation(self) -> dict[str, float]:
        """Share of the window in which each station was busy, 0..1; empty before the second snapshot.

        Busy time is counted when a unit of work ends, so a long unit that began before the window is clipped to 1.
        """
        return {station: min(1.0, gain) for station, gain in self._per_s("busy_s").items()}

    def per_s(self, counter: str) -> float:
        """Increase of a counter per second, over all stations; 0 before the second snapshot."""
        return sum(self._per_s(counter).values())

    def _per_s(self, counter: str) -> dict[str, float]:
        if len(self._snapshots) < 2:
            return {}
        (begin, first), (end, last) = self._snapshots[0], self._snapshots[-1]
        if end <= begin:
            return {}
        gains: dict[str, float] = {}
        for station, counts in last.items():
            before = first.get(station, {}).get(counter, 0.0)
            gains[station] = max(0.0, counts.get(counter, 0.0) - before) / (end - begin)
        return gains


def by_kind(shares: Mapping[str, float], most: int) -> dict[str, float]:
    """Shares by station or, for more than `most` stations, the mean of each kind: `simulator ×8`."""
    if len(shares) <= most:
        return dict(shares)
    kinds: dict[str, list[float]] = {}
    for name, share in shares.items():
        kinds.setdefault(name.rpartition("-")[0] or name, []).append(share)
    return {f"{kind} ×{len(own)}" if len(own) > 1 else kind: sum(own) / len(own) for kind, own in kinds.items()}


class Utilisation:
    """An accumulator of busy time; it reads no clock, each change has its time, which never decreases.

    slots: work items that the station can process at once (0 while it is away); active: items that it has. Example: one
    slot, one item from 0 s to 3 s, read at 4 s: 3/4.
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
        """Number of work items of the station, some of which may wait for a slot."""
        return self._active

    def begin(self, now: float, pieces: int = 1) -> None:
        self._advance(now)
        self._active += pieces

    def end(self, now: float, pieces: int = 1) -> None:
        self._advance(now)
        assert self._active >= pieces, f"{pieces} pieces ended, {self._active} were active"
        self._active -= pieces

    def offer(self, now: float, slots: int) -> None:
        """Change the number of slots; 0 when the station is lost, together with its active work."""
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
