"""A search: forecasts of every candidate, in slices, from one snapshot; and the measured rates that correct them.

The candidates are a grid of requests per batch and longest waits (`build_grid`). A forecast cannot model everything
(slots that share a thread return later when they are served together); the rows per second between two searches are
what the limits in force really achieved (`RateMeter`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field

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
    """The conditions under which rates are comparable. pass_s: predicted seconds of a pass of share_rows rows.
    short_absence_s: the 5th percentile of all absences. share_rows: rows of all slots per generator."""

    pass_s: float = 0.0
    short_absence_s: float = 0.0
    share_rows: float = 0.0


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
    sizes = {-(-slots // part) for part in parts} | {-(-3 * slots // 4)}
    sizes |= {max(1, rows // largest) for rows in (settings.max_rows, *settings.buckets)}
    sizes = {min(size, slots, settings.max_requests) for size in sizes}
    return {
        Candidate(size, wait): BatchLimits(min(settings.max_rows, size * largest), size, WAIT_CYCLES[wait] * cycle_s)
        for size in sorted(sizes)
        for wait in reversed(range(len(WAIT_CYCLES)))
    }


#: Least relative difference between a measured rate and its forecast that is taken for more than noise.
NOISE = 0.03
#: Lifetime of a measurement, in durations of the latest search.
LIFETIME_SEARCHES = 40.0


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """rows_per_s with a candidate in force; at: end of the measurement."""

    rows_per_s: float
    at: float


@dataclass(slots=True)
class RateMeter:
    """Counts answered rows, and keeps the rates that candidates achieved while in force. rows: answered since time
    `since`; since = 0: not counting. point: conditions under which `rates` were measured."""

    rows: int = 0
    since: float = 0.0
    rates: dict[Candidate, MeasuredRate] = field(default_factory=dict)
    point: OperatingPoint = field(default_factory=OperatingPoint)

    def begin(self, point: OperatingPoint, now: float) -> None:
        self.point, self.rows, self.since = point, 0, now

    def measure(self, candidate: Candidate, search: Search, now: float) -> None:
        """Record the rate of `candidate` since the last search, and start counting again. A second measurement of a
        candidate counts half. Rates under other conditions, or too old ones, are dropped."""
        if any(map(has_drifted, astuple(search.point), astuple(self.point))):
            self.rates.clear()
            self.point = search.point
        elif self.since:
            rate = self.rows / max(now - self.since, 1e-9)
            before = self.rates.get(candidate)
            self.rates[candidate] = MeasuredRate((rate + (before.rows_per_s if before else rate)) / 2, now)
        self.rows, self.since = 0, now
        oldest = now - LIFETIME_SEARCHES * (now - search.began)
        self.rates = {key: measured for key, measured in self.rates.items() if measured.at >= oldest}

    def correct(self, forecasts: dict[Candidate, float], candidate: Candidate) -> dict[Candidate, float]:
        """Expected rows per second of every candidate. candidate: the one in force.

        All forecasts are scaled by measured / forecast of the candidate in force; where another candidate's measurement
        differs from its scaled forecast by more than NOISE, the measurement is taken.
        """
        here = self.rates.get(candidate)
        error = here.rows_per_s / forecasts[candidate] if here else 1.0
        expected = {key: error * rate for key, rate in forecasts.items()}
        for key, measured in self.rates.items():
            if key in expected and abs(measured.rows_per_s - expected[key]) > NOISE * expected[key]:
                expected[key] = measured.rows_per_s
        return expected
