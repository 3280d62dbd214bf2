"""`batching: auto`: limits that are chosen while the run goes on, by forecasting what others would achieve.

    answers, requests ─▶ pace (how fast is everybody?) ─▶ forecasts of a grid of limits ─▶ the best, if clearly better

The work is done in slices, after passes, so that a forecast never holds up a decision for long.

Invariant: the limits change only in `finished`; what is due is defined by the present ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.autobatch.forecast import ClosedLoop, Forecast, ForecastLimits
from polyrhythm.scheduler.autobatch.snapshot import UnderWay, served_together, snapshot_loop
from polyrhythm.scheduler.autobatch.timing import ServiceTime, SlotPace
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.padding import padded
from polyrhythm.scheduler.records import BatchingChosen, Request
from polyrhythm.scheduler.settings import SchedulerSettings

#: Requests forecast per second of the run, and at most after one pass.
_PER_SECOND, _AT_ONCE = 10_000, 500
#: Passes of a generator that are not learned from: they compile and warm up.
_WARM_UP = 3
#: Passes, absences of a slot, and the share of slots that had so many, after which there is something to forecast from.
_PASSES, _ABSENCES, _KNOWN = 16, 2, 0.9
#: Passes in which sizes are tried.
_TRIED = 128
#: Absences that are kept in all, and of each slot at least.
_KEPT, _KEPT_BY_EACH = 512, 16
#: Other limits are taken when they promise so much more.
_GAIN = 1.015
#: What promises at least this part of the most counts as equal; the shortest wait of those is taken.
_SAME = 0.99
#: Measured rates that differ from forecasts by less than this say nothing.
_NOISE = 0.03
#: A change of the usual times by which what was measured before counts no more, and a wait is another one.
_DRIFT = 0.25
#: How long what was measured counts where it is measured no more, in times that a search takes.
_REMEMBERED = 40.0
#: How long nothing is forecast after a search, in times that it took, unless passes take another time by _DRIFT.
_REST = 2.0
#: Waits of the candidates, in cycles of a slot; the longest lets those come back that were served together.
_WAITS = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.25)


#: A candidate's place in the grid: its requests, and which of the waits.
Place = tuple[int, int]
#: The place of limits that are in no grid: the first ones, or those whose wait was for a cycle of another length.
_NOWHERE: Place = (0, 0)


@dataclass(slots=True)
class Search:
    """A look at all candidates. left: those still to forecast, the next one last; first: rate of the candidate under
    way from its first start, before its second; rates: found so far; away: median absence of a slot; usual: seconds of
    a pass of a generator's share of all rows, and of a short absence, and that share; played: requests, so far."""

    loop: ClosedLoop
    began: float
    grid: dict[Place, ForecastLimits]
    left: list[Place]
    away: float
    usual: tuple[float, float, float]
    forecast: Forecast | None = None
    first: float = 0.0
    rates: dict[Place, float] = field(default_factory=dict)
    played: int = 0


@dataclass(slots=True)
class BatchTuner:
    """limits: those in force. passes: generator → (when its pass began, its rows, its slots); warm: passes of each
    present generator, of which there are `generators`; worked: when forecasting was last paid for; rested: when the
    next search may begin; chosen: the last choice, if there was one, and whether it is announced; place: of the limits.

    answered: rows since `counted`; measured: place → rows per second that were, and when; usual: of the
    search, to which these belong.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    limits: ForecastLimits
    service: ServiceTime = field(default_factory=ServiceTime)
    slots: dict[str, SlotPace] = field(default_factory=dict)
    passes: dict[str, UnderWay] = field(default_factory=dict)
    warm: dict[str, int] = field(default_factory=dict)
    generators: int = 0
    worked: float = 0.0
    rested: float = 0.0
    search: Search | None = None
    chosen: BatchingChosen | None = None
    announced: bool = True
    place: Place = _NOWHERE
    answered: int = 0
    counted: float = 0.0
    measured: dict[Place, tuple[float, float]] = field(default_factory=dict)
    usual: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @classmethod
    def begin(cls, settings: SchedulerSettings) -> BatchTuner:
        return cls(settings, ForecastLimits(settings.max_rows, settings.max_requests, 0.0))

    # ------------------------------------------------------------ listening

    def asked(self, request: Request, now: float) -> None:
        """A request arrived."""
        pace = self.slots.get(request.slot)
        if pace is None:
            pace = self.slots[request.slot] = SlotPace(generator=request.generator or "")
        if pace.is_served:  # the answer was faster than the report that it is out
            pace.answered(now)
        pace.asked(request.rows, now, max(_KEPT // len(self.slots), _KEPT_BY_EACH))

    def started(self, generator: str, requests: Sequence[Request], now: float) -> None:
        """A generator was given a batch."""
        self.passes[generator] = (now, sum(r.rows for r in requests), tuple(r.slot for r in requests))
        for request in requests:
            if request.slot in self.slots:
                self.slots[request.slot].is_served = True

    def finished(self, generator: str, answered: Sequence[str], now: float, generators: int) -> None:
        """Its pass is over; these slots are away now. generators: how many there are to serve."""
        began, rows, _ = self.passes.pop(generator)
        self.answered += rows
        if generators != self.generators:
            self.generators, self.search, self.rested = generators, None, 0.0
            self.measured.clear()
        warm = self.warm[generator] = self.warm.get(generator, 0) + 1
        if warm > _WARM_UP:
            self.service.note(padded(rows, self.settings.buckets), now - began)
        for slot in answered:
            if slot in self.slots:
                self.slots[slot].answered(now)
        self._work(now)

    def forget(self, slot: str) -> None:
        """A slot is gone."""
        self.slots.pop(slot, None)

    def left(self, generator: str) -> None:
        """A generator is gone."""
        for slot in self.passes.pop(generator, (0.0, 0, ()))[2]:
            if slot in self.slots:
                self.slots[slot].is_served = False
        self.warm.pop(generator, None)

    def restart(self) -> None:
        """The run is resumed, under another clock: what was learned stays, what was under way does not."""
        self.search, self.worked, self.rested, self.counted = None, 0.0, 0.0, 0.0
        self.measured.clear()

    # ------------------------------------------------------------ searching

    def _work(self, now: float) -> None:
        """Forecast as much as the time since the last time pays for."""
        if self.search is None:
            self.search = self._begin(now, max(1, self.generators))
            self.worked = now
        search, work = self.search, min(_AT_ONCE, int(_PER_SECOND * (now - self.worked)))
        if search is None or not work:
            return
        self.worked = now
        while work > 0 and search.left:
            work = self._forecast(search, work)
        if not search.left:
            self.search = None
            self.rested = now + _REST * search.played / _PER_SECOND
            self._choose(search, now)

    def _begin(self, now: float, generators: int) -> Search | None:
        """A new search, if it is time for one and there is something to forecast from."""
        seconds, _, rows = self.usual
        slower = abs(self.service.of(rows) - seconds) > _DRIFT * seconds
        if now < self.rested and not slower:
            return None
        known = {name: pace for name, pace in self.slots.items() if len(pace.away) >= _ABSENCES}
        learned = self.service.passes >= _PASSES and len(known) >= _KNOWN * len(self.slots)
        if self.chosen is None:
            # Passes of different sizes show how their time depends on it.
            trying = not learned and self.service.passes < _TRIED
            most = sum(pace.most for pace in self.slots.values()) >> (self.service.passes % 4 if trying else 0)
            self.limits = ForecastLimits(min(self.settings.max_rows, max(1, most)), self.settings.max_requests, 0.0)
        if not learned or not known:
            return None
        known, generators = served_together(known, generators, shared=self.settings.routing == "least_loaded")
        loop = snapshot_loop(known, self.passes.values(), self.service, self.settings.buckets, generators, now)
        absences = sorted(seconds for times in loop.away for seconds in times)
        away, short = absences[len(absences) // 2], absences[len(absences) // 20]
        share = sum(loop.rows) / generators
        usual = (self.service.of(share), short, share)
        if self.chosen is None:
            self.place, self.usual, self.answered, self.counted = (len(known), 0), usual, 0, now
        grid = self._grid([pace.most for pace in known.values()], generators, away)
        return Search(loop, now, grid, [place for place in grid if place != self.place] + [self.place], away, usual)

    def _grid(self, rows: list[int], count: int, away: float) -> dict[Place, ForecastLimits]:
        """All candidates, with the limits in force among them. rows: of full slots; count: generators.

        It counts requests, not rows: a slot may be short of a row whose episode has just ended, and a batch that waits
        for that one row would wait for another slot.
        """
        slots, largest, cap = len(rows), max(rows), self.settings.max_rows
        # Three quarters: all but the stragglers.
        sizes = {-(-slots // part) for part in (1, 2, 4, count, count + 1, 2 * count)} | {-(-3 * slots // 4)}
        sizes |= {max(1, full // largest) for full in (cap, *self.settings.buckets)}
        sizes = {min(size, slots, self.settings.max_requests) for size in sizes}
        cycle = away + self.service.of(sum(rows) / count)
        grid = {
            (size, number): ForecastLimits(min(cap, size * largest), size, _WAITS[number] * cycle)
            for size in sorted(sizes)
            for number in reversed(range(len(_WAITS)))
        }
        present = grid.get(self.place)
        if present is None or abs(present.max_wait_s - self.limits.max_wait_s) > _DRIFT * present.max_wait_s:
            self.place = _NOWHERE
            self.measured.pop(_NOWHERE, None)
        grid[self.place] = self.limits
        return grid

    def _forecast(self, search: Search, work: int) -> int:
        """Go on with the candidate under way; the work left."""
        place = search.left[-1]
        if search.forecast is None:
            slots, limits = len(search.loop.rows), search.grid[place]
            search.forecast = Forecast(search.loop, limits, 2 * slots + 64, 6 * slots + 320, search.first > 0.0)
        played = search.forecast.run(work)
        search.played += played
        work -= played
        rate = search.forecast.rate
        if rate:
            search.forecast = None
            best = max(search.rates.values(), default=0.0)
            if search.first or rate < best:
                search.rates[place] = min(rate, search.first) if search.first else rate
                search.first = 0.0
                search.left.pop()
            else:
                search.first = rate
        return work

    def _choose(self, search: Search, now: float) -> None:
        """Take the best candidate if it is clearly better than the limits in force."""
        rates = self._judged(search, now)
        enough = _SAME * max(rates.values())
        best = min(
            (place for place in rates if rates[place] >= enough), key=lambda place: search.grid[place].max_wait_s
        )
        if self.chosen is not None and rates[best] < _GAIN * rates[self.place]:
            return
        loop, former, limits = search.loop, self.limits, search.grid[best]
        reason = (
            f"a pass takes {1e3 * loop.base:.3g} ms + {1e3 * loop.per_row:.3g} ms per row, {len(loop.rows)} slots are "
            f"away for {1e3 * search.away:.3g} ms; expected are {rates[best]:.4g} rows/s, and {rates[self.place]:.4g} "
            f"with {min(former.max_requests, len(loop.rows))} requests and {1e3 * former.max_wait_s:.3g} ms"
        )
        self.limits, self.place = limits, best
        requests = min(limits.max_requests, len(loop.rows))
        self.chosen = BatchingChosen(limits.max_rows, requests, limits.max_wait_s, reason)
        self.announced = False

    def _judged(self, search: Search, now: float) -> dict[Place, float]:
        """What to expect of each candidate: what was measured there, else the forecast, as wrong as it is here.

        Measured is what a candidate made of the same pass and absence; it is believed where it clearly differs.
        """
        here = self.place
        if any(abs(new - old) > _DRIFT * old for new, old in zip(search.usual, self.usual, strict=True)):
            self.measured.clear()
            self.usual = search.usual
        elif self.counted:
            rate = self.answered / max(now - self.counted, 1e-9)
            self.measured[here] = ((rate + self.measured.get(here, (rate, now))[0]) / 2, now)
        self.answered, self.counted = 0, now
        oldest = now - _REMEMBERED * (now - search.began)
        self.measured = {place: (rate, at) for place, (rate, at) in self.measured.items() if at >= oldest}
        error = self.measured[here][0] / search.rates[here] if here in self.measured else 1.0
        rates = {place: error * rate for place, rate in search.rates.items()}
        for place, (rate, _) in self.measured.items():
            if place in rates and abs(rate - rates[place]) > _NOISE * rates[place]:
                rates[place] = rate
        return rates
