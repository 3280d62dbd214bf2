"""Computes recent utilisation and rates of stations from their cumulative counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping


class Activity:
    """A sliding window over cumulative counters; it reads no clock, each snapshot comes with its time.

    Example: a station with `busy_s` 3.0 at 10 s and 7.5 at 16 s was busy for 75% of the time between.
    """

    def __init__(self, window_s: float = 10.0) -> None:
        self._window_s = window_s
        self._snapshots: deque[tuple[float, dict[str, dict[str, float]]]] = deque()

    def take(self, now: float, counters: Mapping[str, Mapping[str, float]]) -> None:
        """Add a snapshot of each station's counters; drop all but the latest snapshot that is older than the window."""
        self._snapshots.append((now, {station: dict(counts) for station, counts in counters.items()}))
        while len(self._snapshots) > 2 and self._snapshots[1][0] <= now - self._window_s:
            self._snapshots.popleft()

    def utilisation(self) -> dict[str, float]:
        """The share of the window in which each station was busy, 0..1; empty before the second snapshot.

        Busy time is counted when a unit of work ends, so a long one that began before the window is cut at 1.
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
    """The shares by station, or, of more than `most` stations, the mean of each kind: `simulator ×8`."""
    if len(shares) <= most:
        return dict(shares)
    kinds: dict[str, list[float]] = {}
    for name, share in shares.items():
        kinds.setdefault(name.rpartition("-")[0] or name, []).append(share)
    return {f"{kind} ×{len(own)}" if len(own) > 1 else kind: sum(own) / len(own) for kind, own in kinds.items()}
