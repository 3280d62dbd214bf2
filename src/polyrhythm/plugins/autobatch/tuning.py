"""`batching: auto`: chooses the batch limits during the run.

    requests, passes ─▶ timing ─▶ snapshot ─▶ search (forecasts of a grid of candidates) ─▶ the best, if clearly better
                                                              rates (measured) ─▲

The work is done in slices after passes, so that no decision of the conductor waits long for a forecast.

Invariant: the limits change only in `on_pass_finished`; whether a batch is due follows from those in force. Equal
events at equal times give equal choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from polyrhythm.plugins.autobatch.forecast import ClosedLoop, Forecast, select_group, snapshot_loop
from polyrhythm.plugins.autobatch.search import (
    OFF_GRID,
    Candidate,
    MeasuredRate,
    OperatingPoint,
    RateMeter,
    Search,
    build_grid,
    has_drifted,
)
from polyrhythm.plugins.autobatch.timing import ClusterTiming, PassTimeModel, RunningPass, SlotTiming
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import BatchingChosen, Request
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings

#: Requests that a search simulates per second of the run: a bound on its share of the main process's time.
SIMULATED_PER_S = 10_000
#: Requests simulated after one pass, at most: a bound on how long the next decision is held up.
SIMULATED_AT_ONCE = 500
#: Measured passes, and absences per slot, below which a forecast would be guesswork.
MIN_PASSES, MIN_ABSENCES = 16, 2
#: Share of the present slots that must have that many absences: the first ones back are not representative.
MIN_KNOWN_SHARE = 0.9
#: Pause after a search, in durations of it, unless passes have become slower or faster by more than DRIFT.
PAUSE_SEARCHES = 2.0
#: Passes during which different sizes are tried, so that base and slope of a pass's time can be told apart.
TRIAL_PASSES = 128
#: The trial's sizes are all rows divided by 1, 2, 4 and 8, in turn.
TRIAL_SIZES = 4
#: Other limits are taken if they promise this multiple of the rate of those in force: forecasts are about 1% uncertain.
MIN_GAIN = 1.015
#: Candidates within this part of the best rate count as equal; the one with the shortest wait is taken, because a short
#: wait does little harm if the forecast is wrong.
EQUAL_SHARE = 0.99


@dataclass(slots=True)
class BatchTuner:
    """Chooses the batch limits from the conductor's requests and passes.

    limits: in force; candidate: their point in the grid. choice: the last one, None before the first; announced:
    whether it was announced. generators: serving at the last pass. simulated_until: time up to which the simulation
    budget is spent. next_search_at: end of the pause after a search.
    """

    saved: ClassVar[tuple[type, ...]] = ()  # below: this class is one of them

    settings: SchedulerSettings = field(metadata=UNSAVED)
    limits: BatchLimits
    candidate: Candidate = OFF_GRID
    choice: BatchingChosen | None = None
    announced: bool = True
    timing: ClusterTiming = field(default_factory=ClusterTiming)
    meter: RateMeter = field(default_factory=RateMeter)
    search: Search | None = None
    generators: int = 0
    simulated_until: float = 0.0
    next_search_at: float = 0.0

    @classmethod
    def begin(cls, settings: SchedulerSettings) -> BatchTuner:
        return cls(settings, BatchLimits(settings.max_rows, settings.max_requests, 0.0))

    def on_request(self, request: Request, now: float) -> None:
        self.timing.record_request(request, now)

    def on_pass_started(self, generator: str, requests: Sequence[Request], now: float) -> None:
        self.timing.start_pass(generator, requests, now)

    def on_pass_finished(self, generator: str, answered: Sequence[str], now: float, generators: int) -> None:
        self.meter.rows += self.timing.finish_pass(generator, answered, now, self.settings.buckets)
        if generators != self.generators:
            self.generators, self.search, self.next_search_at = generators, None, 0.0
            self.meter.rates.clear()
        self._work(now)

    def remove_slot(self, slot: str) -> None:
        self.timing.remove_slot(slot)

    def remove_generator(self, generator: str) -> None:
        self.timing.remove_generator(generator)

    def restart_clock(self) -> None:
        """The run is resumed under another clock: keep learned times and limits, reset everything else."""
        self.search, self.simulated_until, self.next_search_at = None, 0.0, 0.0
        self.meter.since = 0.0
        self.meter.rates.clear()

    def take_announcement(self) -> BatchingChosen | None:
        if self.announced:
            return None
        self.announced = True
        return self.choice

    def _work(self, now: float) -> None:
        """Continue or begin a search: as many requests as the time since the last call allows."""
        if self.search is None:
            self.search = self._begin_search(now)
            self.simulated_until = now
        search, requests = self.search, min(SIMULATED_AT_ONCE, int(SIMULATED_PER_S * (now - self.simulated_until)))
        if search is None or not requests:
            return
        self.simulated_until = now
        search.advance(requests)
        if not search.remaining:
            self.search = None
            self.next_search_at = now + PAUSE_SEARCHES * search.simulated / SIMULATED_PER_S
            self._choose(search, now)

    def _begin_search(self, now: float) -> Search | None:
        point, pass_time = self.meter.point, self.timing.pass_time
        if now < self.next_search_at and not has_drifted(pass_time.predict(point.share_rows), point.pass_s):
            return None
        slots = self.timing.slots
        known = {name: slot for name, slot in slots.items() if len(slot.absences_s) >= MIN_ABSENCES}
        is_sufficient = pass_time.passes >= MIN_PASSES and len(known) >= MIN_KNOWN_SHARE * len(slots)
        if self.choice is None:
            self.limits = self._first_limits(is_sufficient)
        if not is_sufficient or not known:
            return None
        own, generators = select_group(known, max(1, self.generators), shared=self.settings.routing == "least_loaded")
        loop = snapshot_loop(own, generators, self.timing.running.values(), pass_time, self.settings.buckets, now)
        absences = sorted(seconds for slot in loop.absences_s for seconds in slot)
        median_s, short_s = absences[len(absences) // 2], absences[len(absences) // 20]
        share_rows = sum(loop.rows) / generators
        point = OperatingPoint(pass_time.predict(share_rows), short_s, share_rows)
        if self.choice is None:
            self.candidate = Candidate(len(own), 0)
            self.meter.begin(point, now)
        slot_rows = [slot.max_rows for slot in own.values()]
        cycle_s = median_s + pass_time.predict(sum(slot_rows) / generators)
        grid = build_grid(slot_rows, generators, self.settings, cycle_s)
        self._place_limits(grid)
        others = [candidate for candidate in grid if candidate != self.candidate]
        return Search(loop, now, grid, [*others, self.candidate], median_s, point)

    def _first_limits(self, is_sufficient: bool) -> BatchLimits:
        """Limits before the first choice: no wait, and varying sizes while measurements are missing."""
        passes = self.timing.pass_time.passes
        is_trying = not is_sufficient and passes < TRIAL_PASSES
        rows = sum(slot.max_rows for slot in self.timing.slots.values()) >> (passes % TRIAL_SIZES if is_trying else 0)
        return BatchLimits(min(self.settings.max_rows, max(1, rows)), self.settings.max_requests, 0.0)

    def _place_limits(self, grid: dict[Candidate, BatchLimits]) -> None:
        """Add the limits in force to the grid: at their candidate, or OFF_GRID if its wait has changed."""
        present = grid.get(self.candidate)
        if present is None or has_drifted(self.limits.max_wait_s, present.max_wait_s):
            self.candidate = OFF_GRID
            self.meter.rates.pop(OFF_GRID, None)
        grid[self.candidate] = self.limits

    def _choose(self, search: Search, now: float) -> None:
        """Choose the best candidate, if it is clearly better than the limits in force."""
        self.meter.measure(self.candidate, search, now)
        expected = self.meter.correct(search.rates, self.candidate)
        enough = EQUAL_SHARE * max(expected.values())
        equals = [candidate for candidate in expected if expected[candidate] >= enough]
        best = min(equals, key=lambda candidate: search.grid[candidate].max_wait_s)
        if self.choice is not None and expected[best] < MIN_GAIN * expected[self.candidate]:
            return
        loop, former, limits = search.loop, self.limits, search.grid[best]
        slots = len(loop.rows)
        reason = (
            f"a pass takes {1e3 * loop.base_s:.3g} ms + {1e3 * loop.per_row_s:.3g} ms per row, {slots} slots are away "
            f"for {1e3 * search.median_absence_s:.3g} ms; expected are {expected[best]:.4g} rows/s, and "
            f"{expected[self.candidate]:.4g} with {min(former.max_requests, slots)} requests and "
            f"{1e3 * former.max_wait_s:.3g} ms"
        )
        self.limits, self.candidate = limits, best
        self.choice = BatchingChosen(limits.max_rows, min(limits.max_requests, slots), limits.max_wait_s, reason)
        self.announced = False


BatchTuner.saved = (
    *(BatchTuner, Candidate, ClosedLoop, ClusterTiming, Forecast, MeasuredRate),
    *(OperatingPoint, PassTimeModel, RateMeter, RunningPass, Search, SlotTiming),
)
