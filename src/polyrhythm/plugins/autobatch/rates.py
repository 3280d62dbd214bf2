"""Measured rates of past limits, which correct the forecasts.

A forecast cannot model everything (slots that share a thread return later when they are served together); the rows per
second between two searches are what the limits in force really achieved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.plugins.autobatch.search import Candidate, OperatingPoint, Search

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

    def restart(self) -> None:
        """Stop counting and drop all rates: the clock starts anew."""
        self.since = 0.0
        self.rates.clear()

    def measure(self, candidate: Candidate, search: Search, now: float) -> None:
        """Record the rate of `candidate` since the last search, and start counting again. A second measurement of a
        candidate counts half. Rates under other conditions, or too old ones, are dropped."""
        if search.point.has_drifted_from(self.point):
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
