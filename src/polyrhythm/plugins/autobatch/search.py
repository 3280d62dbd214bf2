"""A search: forecasts of every candidate, in slices, from one snapshot of the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.plugins.autobatch.candidates import Candidate
from polyrhythm.plugins.autobatch.forecast import ClosedLoop, Forecast
from polyrhythm.scheduler.settings import BatchLimits

#: Requests of a forecast: a + b · slots. The warm-up is two cycles of each slot and some, the count four times that.
WARM_UP_REQUESTS, WARM_UP_CYCLES = 64, 2
TOTAL_REQUESTS, TOTAL_CYCLES = 320, 6
#: Relative change of a time by which measurements under the old one no longer count.
DRIFT = 0.25


def has_drifted(new: float, old: float) -> bool:
    """Whether a time or a size has changed so much that what was measured before no longer counts."""
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
        """Whether any of the three has changed by more than DRIFT."""
        return (
            has_drifted(self.pass_s, old.pass_s)
            or has_drifted(self.short_absence_s, old.short_absence_s)
            or has_drifted(self.share_rows, old.share_rows)
        )


@dataclass(slots=True)
class Search:
    """Forecasts of all candidates of `grid` for `loop`; complete when `remaining` is empty.

    began: time on the conductor's clock. median_absence_s: over all slots. remaining: candidates still to forecast,
    the next one last. forecast: the one under way. rate_from_present: rows per second of the next candidate when
    started from the present state, 0 until that is known. rates: rows per second of those that are done.
    simulated: requests simulated so far.
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
        """Simulate about so many requests more, or to the end of the search."""
        while requests > 0 and self.remaining:
            forecast = self._next_forecast()
            simulated = forecast.advance(requests)
            self.simulated += simulated
            requests -= simulated
            if forecast.rate:
                self.forecast = None
                self._note_rate(forecast.rate)

    def _next_forecast(self) -> Forecast:
        """The forecast under way, or a new one of the next candidate."""
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

    def _note_rate(self, rate: float) -> None:
        """A forecast has ended. A candidate that may be the best is forecast from both starts, and the worse counts.

        Slots that are served together stay together, so what a rule achieves can depend on where it starts.
        """
        if self.rate_from_present:
            rate = min(rate, self.rate_from_present)
        elif rate >= max(self.rates.values(), default=0.0):
            self.rate_from_present = rate
            return
        self.rates[self.remaining.pop()] = rate
        self.rate_from_present = 0.0
