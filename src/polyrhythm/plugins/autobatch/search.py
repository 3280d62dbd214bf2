"""A search: forecasts of every candidate, in slices, from one snapshot of the cluster.

The candidates are a grid of requests per batch and longest waits (`build_grid`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.plugins.autobatch.forecast import ClosedLoop, Forecast
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings

#: Requests of a forecast: a + b · slots. The warm-up is two cycles of each slot and some, the count four times that.
WARM_UP_REQUESTS, WARM_UP_CYCLES = 64, 2
TOTAL_REQUESTS, TOTAL_CYCLES = 320, 6
#: Relative change of a time by which measurements under the old one no longer count.
DRIFT = 0.25


def has_drifted(new: float, old: float) -> bool:
    """Whether a time or size has changed too much for earlier measurements to count."""
    return abs(new - old) > DRIFT * old


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The conditions under which rates are comparable.

    pass_s: predicted seconds of a pass of share_rows rows. short_absence_s: the 5th percentile of all absences.
    share_rows: rows of all slots per generator.
    """

    pass_s: float = 0.0
    short_absence_s: float = 0.0
    share_rows: float = 0.0

    def has_drifted_from(self, old: OperatingPoint) -> bool:
        return (
            has_drifted(self.pass_s, old.pass_s)
            or has_drifted(self.short_absence_s, old.short_absence_s)
            or has_drifted(self.share_rows, old.share_rows)
        )


@dataclass(slots=True)
class Search:
    """Forecasts of all candidates of `grid` for `loop`; complete when `remaining` is empty.

    began: time on the conductor's clock. median_absence_s: over all slots. remaining: candidates still to forecast, the
    next one last. forecast: the current one. rate_from_present: rows per second of the next candidate when started from
    the present state, 0 until known. rates: rows per second of finished candidates. simulated: requests simulated so
    far.
    """

    loop: ClosedLoop
    began: float
    grid: dict[Candidate, BatchLimits]
    remaining: list[Candidate]
    median_absence_s: float
    point: OperatingPoint
    forecast: Forecast | None = None
    rate_from_present: float = 0.0
    rates: dict[Candidate, float] = field(default_factory=dict)
    simulated: int = 0

    def advance(self, requests: int) -> None:
        """Simulate about `requests` more requests, or to the end of the search."""
        while requests > 0 and self.remaining:
            forecast = self._next_forecast()
            simulated = forecast.advance(requests)
            self.simulated += simulated
            requests -= simulated
            if forecast.rate:
                self.forecast = None
                self._add_rate(forecast.rate)

    def _next_forecast(self) -> Forecast:
        if self.forecast is None:
            slots = len(self.loop.rows)
            self.forecast = Forecast(
                self.loop,
                self.grid[self.remaining[-1]],
                WARM_UP_REQUESTS + WARM_UP_CYCLES * slots,
                TOTAL_REQUESTS + TOTAL_CYCLES * slots,
                together=self.rate_from_present > 0.0,
            )
        return self.forecast

    def _add_rate(self, rate: float) -> None:
        """Add the rate of a finished forecast. A candidate that may be the best is forecast from both starts; the worse
        counts. Slots that are served together stay together, so a rule's rate can depend on its start."""
        if self.rate_from_present:
            rate = min(rate, self.rate_from_present)
        elif rate >= max(self.rates.values(), default=0.0):
            self.rate_from_present = rate
            return
        self.rates[self.remaining.pop()] = rate
        self.rate_from_present = 0.0


#: Longest waits of the grid, in cycles of a slot (its absence and a pass). The last one is longer than a cycle, so that
#: all slots that were served together can come back; no wait is unlimited, so a slot that hangs cannot stop the others.
WAIT_CYCLES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.25)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the grid: requests per batch, and the index of its wait in WAIT_CYCLES."""

    requests: int
    wait: int


#: Stands for limits that are in no grid: those of the start, or those whose wait belongs to another length of cycle.
OFF_GRID = Candidate(0, 0)


def build_grid(
    slot_rows: Sequence[int], generators: int, settings: SchedulerSettings, cycle_s: float
) -> dict[Candidate, BatchLimits]:
    """All candidates with their limits. slot_rows: of full slots; cycle_s: seconds of a slot's absence and a pass.

    Requests per batch: of all S slots the whole, three quarters (all but the stragglers), a half and a quarter; S / (G
    + 1), S / G and S / 2G with G generators; and as many full slots as fill max_rows or a bucket. Sizes are counted in
    requests, not rows: a slot lacks a row while that row has no episode, and a batch that waited for one more row would
    wait for a whole further slot.
    """
    slots, largest = len(slot_rows), max(slot_rows)
    parts = (1, 2, 4, generators, generators + 1, 2 * generators)
    sizes = {_divide_up(slots, part) for part in parts} | {_divide_up(3 * slots, 4)}
    sizes |= {max(1, rows // largest) for rows in (settings.max_rows, *settings.buckets)}
    sizes = {min(size, slots, settings.max_requests) for size in sizes}
    return {
        Candidate(size, wait): BatchLimits(min(settings.max_rows, size * largest), size, WAIT_CYCLES[wait] * cycle_s)
        for size in sorted(sizes)
        for wait in reversed(range(len(WAIT_CYCLES)))
    }


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
