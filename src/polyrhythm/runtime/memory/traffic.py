"""What one end of the weights channel has moved, and how fast: counters that a station's heartbeat carries.

weights/<way>/versions, bytes, s    taken by a generator, by the way that they came
weights/published/versions, …       made readable by the trainer
weights/apply/versions, …           brought into the module; meanwhile nothing is served
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

_PREFIX = "weights"
PUBLISHED, APPLY = "published", "apply"


@dataclass(slots=True)
class Moved:
    """Versions, their bytes, and the seconds that they took."""

    versions: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """10^9 bytes per second; 0 before anything was moved."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def mb(self) -> float:
        """10^6 bytes of one version in the mean; 0 before the first."""
        return self.nbytes / self.versions / 1e6 if self.versions else 0.0

    @property
    def ms(self) -> float:
        """Milliseconds of one version in the mean; 0 before the first."""
        return 1e3 * self.seconds / self.versions if self.versions else 0.0


class Traffic:
    """Counts by kind: a way, `PUBLISHED` or `APPLY`."""

    def __init__(self) -> None:
        self.moved: dict[str, Moved] = {}

    def add(self, kind: str, nbytes: int, seconds: float) -> None:
        """Count one version."""
        moved = self.moved.setdefault(kind, Moved())
        moved.versions += 1
        moved.nbytes += nbytes
        moved.seconds += seconds

    @contextmanager
    def timed(self, kind: str, nbytes: int) -> Iterator[None]:
        """Count one version, moved within this context, unless that fails."""
        begin = time.perf_counter()
        yield
        self.add(kind, nbytes, time.perf_counter() - begin)

    def statistics(self) -> dict[str, float]:
        """As counters of a station."""
        found: dict[str, float] = {}
        for kind, moved in self.moved.items():
            counts = (("versions", moved.versions), ("bytes", moved.nbytes), ("s", moved.seconds))
            found |= {f"{_PREFIX}/{kind}/{name}": float(count) for name, count in counts}
        return found


def read_traffic(counters: Mapping[str, float]) -> dict[str, Moved]:
    """A station's counters of traffic, by kind."""
    kinds = dict.fromkeys(name.split("/")[1] for name in counters if name.startswith(f"{_PREFIX}/"))
    return {
        kind: Moved(
            int(counters.get(f"{_PREFIX}/{kind}/versions", 0)),
            int(counters.get(f"{_PREFIX}/{kind}/bytes", 0)),
            counters.get(f"{_PREFIX}/{kind}/s", 0.0),
        )
        for kind in kinds
    }
