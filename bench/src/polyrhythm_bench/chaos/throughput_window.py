"""Throughput in sliding windows, and its usual value.

The measure is chunk steps per second: each row of each request that is heard asks for one. Episodes and samples would
not do, since their length changes with learning. A window holds several updates of a small recipe; where one update
takes longer than a window, rates swing with it, and an update that is lost with its trainer is seconds of recovery.
What is usual is the median over the windows of the latest undisturbed time: a short dip does not move it, while it
follows learning and contention. Undisturbed is what lies between a recovery and the next fault.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW_S = 2.0
_EVERY_S = 0.5
#: Undisturbed windows that count as the latest: ten seconds.
KEPT = 20


class ThroughputWindow:
    """What was heard in the last `WINDOW_S` seconds, and the undisturbed windows. first: what was usual after the
    first `KEPT` of them, or up to now."""

    def __init__(self) -> None:
        self.first = 0.0
        self.windows = 0
        self._heard: deque[tuple[float, int]] = deque()
        self._rows = 0
        self._kept: deque[float] = deque(maxlen=KEPT)
        self._taken = 0.0

    def hear(self, now: float, rows: int) -> None:
        """A request of so many rows."""
        self._heard.append((now, rows))
        self._rows += rows

    def rate(self, now: float) -> float:
        """Chunk steps per second, over the window that ends now."""
        while self._heard and self._heard[0][0] <= now - WINDOW_S:
            self._rows -= self._heard.popleft()[1]
        return self._rows / WINDOW_S

    def take(self, now: float, calm_since: float) -> bool:
        """Keep the window that ends now, if it is undisturbed and the last one is old enough; whether it was kept."""
        if now < max(calm_since + WINDOW_S, self._taken + _EVERY_S):
            return False
        self._taken = now
        self.windows += 1
        self._kept.append(self.rate(now))
        if self.windows <= KEPT:
            self.first = self.usual
        return True

    @property
    def usual(self) -> float:
        """Median of the latest undisturbed windows; 0 before the first."""
        return median(self._kept) if self._kept else 0.0

    @property
    def calm_s(self) -> float:
        """Seconds of undisturbed windows so far, about."""
        return self.windows * _EVERY_S
