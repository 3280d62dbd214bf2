"""A search: forecasts of the present operation and its neighbours, in slices, all from the same measured times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from polyrhythm.plugins.moves.operation import Operation
from polyrhythm.plugins.moves.timing import MeasuredTimes
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.settings import BatchLimits

#: Events that a search simulates per second of the run, and about as many at once: a bound on its share of the main
#: process's time, and on how long a decision waits.
EVENTS_PER_S, EVENTS_AT_ONCE = 4000, 250


@dataclass(frozen=True, slots=True)
class MoveForecast:
    """samples_per_s: trained ones; lag: mean of theirs, in versions."""

    samples_per_s: float
    lag: float


class MoveSimulation(Protocol):
    """A forecast under way. events: simulated so far."""

    events: int

    def advance(self, seconds: float) -> MoveForecast | None:
        """Simulate so many seconds more; the result at the end, None before."""


class MoveJudge(Protocol):
    """Begins forecasts."""

    def __call__(self, times: MeasuredTimes, operation: Operation, limits: BatchLimits) -> MoveSimulation: ...


@dataclass(slots=True)
class MoveSearch:
    """Forecasts of all of `remaining`, the last one first; complete when it is empty.

    times, limits (of batches): what all are based on. slices: of the current one so far. events: simulated, in all.
    began: time.
    """

    times: MeasuredTimes
    limits: BatchLimits
    began: float
    remaining: list[Operation]
    found: dict[Operation, MoveForecast] = field(default_factory=dict)
    slices: int = 0
    events: int = 0
    current: MoveSimulation | None = field(default=None, init=False, metadata=UNSAVED)

    @property
    def slice_s(self) -> float:
        """Simulated seconds of a slice."""
        return self.times.version_s * min(1.0, EVENTS_AT_ONCE / max(1, self.times.events))

    def work(self, judge: MoveJudge, now: float) -> None:
        """Do the next slice, if the time since the beginning allows it."""
        if not self.remaining or self.events > EVENTS_PER_S * (now - self.began):
            return
        if self.current is None:
            self.current = judge(self.times, self.remaining[-1], self.limits)
            for _ in range(self.slices):  # of a search that was saved in the middle
                self.current.advance(self.slice_s)
        before = self.current.events
        forecast = self.current.advance(self.slice_s)
        self.slices += 1
        self.events += self.current.events - before
        if forecast is not None:
            self.found[self.remaining.pop()] = forecast
            self.current, self.slices = None, 0
