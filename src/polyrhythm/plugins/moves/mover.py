"""Moves between two versions: begun by a forecast, kept by a measurement.

    events, commands ─▶ timing ─▶ search (forecasts of the neighbours) ─▶ the best, if clearly better ─▶ trial
                                            rates of whole versions (measured) ─▶ kept, or undone and barred ─▲

The measured rate is that of whole versions: B samples over the mean time between two publications. Versions in which a
station was lost or training paused for an evaluation are left out, and so are those right after a change, in which the
samples of before it are trained.

Invariants: the operation changes only in `on_published`, `undo_late` and `undo_lost`; α is never above the setting's; a
generator is always on. Equal events at equal times give equal moves.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, field, replace
from math import ceil
from statistics import fmean
from typing import Literal

from polyrhythm.plugins.moves.operation import Operation, neighbours
from polyrhythm.plugins.moves.search import MoveSearch
from polyrhythm.plugins.moves.timing import RunTiming, TimingPoint
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import MoveChosen
from polyrhythm.scheduler.settings import BatchLimits, MoveRules, SchedulerSettings

#: Versions that are measured at least, and at most if the result is not clear.
COUNTED, MOST_COUNTED = 3, 6
#: Forecast gain from which a move is tried, the same while the forecast has only one size of micro-batches to go by,
#: and measured gain from which a move is kept.
MIN_GAIN, MIN_GUESSED, MIN_MEASURED = 0.04, 0.01, 0.01
#: A result within UNCLEAR of the least one is measured for longer. α falls where the rate stays but for the part EQUAL,
#: and the forecast lag is lower by LESS_LAG.
UNCLEAR, EQUAL, LESS_LAG = 0.02, 0.01, 0.2
#: A try begins only while those before have cost less than this part of the time, counted anew when costs change.
TRIES_SHARE = 0.02
#: Versions after which a search is repeated although nothing has changed, and for which an undone move is not tried.
PAUSE, BARRED = 30, 40
#: Publications in a row at which a changed time must be seen.
DRIFTED = 2
#: Reasons of a lost station that speak of memory: errors of Python, CUDA and its libraries, and the kernel's signal.
_NO_MEMORY = re.compile(
    "out of memory|outofmemory|not enough memory|allocate memory|memoryerror|bad_alloc|alloc_failed|sigkill",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class MoveTolerance:
    """How far measurements may differ. drift: relative change of a time from which costs count as changed; unexplained:
    relative loss of the rate that is taken for a change which the times do not show. accurate: error of the present
    operation's forecast above which a move counts as one version lost before it is tried; allowed: versions that a try
    may cost before it ends."""

    drift: float = 0.4
    unexplained: float = 0.08
    accurate: float = 0.25
    allowed: float = 0.6


@dataclass(slots=True)
class MoveTrial:
    """A move under trial. former, rate, intervals: the operation before it, its samples per second and the versions in
    which they were measured. fresher: it lowers α, and is kept if the rate stays. gain: forecast rate over the former.
    excess_s: seconds by which slow versions of it took longer than those of the former operation."""

    former: Operation
    rate: float
    gain: float
    fresher: bool
    intervals: list[float] = field(default_factory=list)
    excess_s: float = 0.0


@dataclass(slots=True)
class Mover:
    """Decides the moves of a run.

    operation: the present one. versions: publications so far; last: time of the latest, below 0 if none counts.
    intervals: seconds of the versions since the last change that count; skip: versions still to leave out. disturbed:
    the present version does not count. point: times under which the measured rate and `barred` hold; drifted:
    publications in a row at which the present ones differ. full_rate: samples per second of the present operation
    when it was first measured in full, 0 before. barred: operation → version until which it is not tried.

    failed: those under which a station was lost, perhaps for lack of memory: what needs as much is never tried again.
    roomier: operations before moves that were kept and need more memory, oldest first; last_loss: of a trainer or
    generator, by name and `versions`.

    lost_s: seconds by which versions of tries that were undone, and those right after them, took longer than those of
    the former operation, since costs changed, less what moves that were kept since then have saved, at least 0, so that
    no credit grows; undone_s: seconds of a version of the one before the last try; saved_s: seconds, at least 0, by
    which those moves make a version shorter. began: time of the first publication. events_before, version_events:
    events until the latest, and of one version.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    rules: MoveRules = field(metadata=UNSAVED)
    timing: RunTiming
    operation: Operation
    versions: int = 0
    last: float = -1.0
    intervals: list[float] = field(default_factory=list)
    skip: int = 0
    disturbed: bool = False
    point: TimingPoint = field(default_factory=TimingPoint)
    drifted: int = 0
    full_rate: float = 0.0
    barred: dict[Operation, int] = field(default_factory=dict)
    failed: list[Operation] = field(default_factory=list)
    trial: MoveTrial | None = None
    search: MoveSearch | None = None
    next_search: int = 0
    roomier: list[Operation] = field(default_factory=list)
    last_loss: tuple[str, int] = ("", -1)
    lost_s: float = 0.0
    undone_s: float = 0.0
    saved_s: float = 0.0
    began: float = -1.0
    events_before: int = 0
    version_events: int = 0
    tolerance: MoveTolerance = field(default=MoveTolerance(), metadata=UNSAVED)

    @property
    def catch_up(self) -> int:
        """Versions after a change whose samples are mostly from before it."""
        return 1 + min(4, ceil(self.settings.max_lag))

    @property
    def rate(self) -> float:
        """Measured samples per second of the present operation; 0 if unknown."""
        return self.settings.version_samples / fmean(self.intervals) if self.intervals else 0.0

    def on_published(self, now: float, limits: BatchLimits) -> list[MoveChosen]:
        """A version is out. Returns moves, after which `operation` is in force. limits: of batches, in force."""
        self.versions += 1
        self.began = now if self.began < 0 else self.began
        self._count_version(now)
        if self._costs_changed():
            return self._start_over()
        moves = [] if self.trial is None else self._check_trial(self.trial)
        search = self.search
        if search is None:
            if self._may_search():
                self._begin_search(now, limits)
        elif self.trial is None and not search.remaining and not self.skip and len(self.intervals) >= COUNTED:
            moves += self._choose(search, now)
        return moves

    def undo_late(self, now: float) -> list[MoveChosen]:
        """End a try whose present version has taken too long already; called between versions."""
        trial = self.trial
        if trial is None or self.last < 0 or self.disturbed:
            return []
        former_s = self.settings.version_samples / trial.rate
        if trial.excess_s + now - self.last - former_s <= self.tolerance.allowed * former_s:
            return []
        trial.excess_s += now - self.last - former_s
        return [self._undo(trial, former_s / (now - self.last))]

    def undo_lost(self, now: float, station: str, why: str) -> list[MoveChosen]:
        """A trainer or generator was lost. End a try that needs more memory, which may be why, and never repeat it; the
        same of a kept move if memory is named, or if the station was lost twice within a version."""
        trial, failed = self.trial, self.operation
        last_loss, self.last_loss = self.last_loss, (station, self.versions)
        undone: MoveChosen | None = None
        if trial is not None and failed.needs_more(trial.former):
            if self.last >= 0:
                trial.excess_s += max(0.0, now - self.last - self.settings.version_samples / trial.rate)
            undone = self._undo(trial, 0.0)
        elif last_loss == self.last_loss or _NO_MEMORY.search(why):
            undone = self._undo_kept(failed)
        if undone is None:
            return []
        self.failed.append(failed)
        reason = f"{station} was lost, perhaps for lack of memory; this is not tried again"
        return [replace(undone, reason=reason)]

    def restart_clock(self) -> None:
        """The run is resumed under another clock and perhaps other bounds: keep the times and the operation, of a try
        the one before it, with the setting's α."""
        kept, rules = self.operation if self.trial is None else self.trial.former, self.rules
        size = kept.micro_batch if kept.micro_batch in rules.micro_batches else rules.micro_batch
        together = kept.together and rules.together
        self.timing.restart_clock()
        self.timing.micro_batch = size
        self.operation = replace(kept, max_lag=self.settings.max_lag, micro_batch=size, together=together)
        self.last, self.began, self.disturbed = -1.0, -1.0, True
        self.search, self.trial, self.next_search = None, None, 0
        self.roomier = [one for one in self.roomier if one.micro_batch in (size, *rules.micro_batches)]
        self.lost_s = self.undone_s = self.saved_s = 0.0
        self._measure_anew()

    # ------------------------------------------------------------ measuring

    def _count_version(self, now: float) -> None:
        if self.last >= 0 and not self.disturbed:
            if self.trial is not None:
                self.trial.excess_s += max(0.0, now - self.last - self.settings.version_samples / self.trial.rate)
            elif self.skip and self.undone_s:
                self.lost_s += max(0.0, now - self.last - self.undone_s)
            if self.skip:
                self.skip -= 1
            else:
                self.intervals.append(now - self.last)
                del self.intervals[:-MOST_COUNTED]
                self.lost_s = max(0.0, self.lost_s - self.saved_s) if self.trial is None else self.lost_s
        self.version_events = self.timing.events - self.events_before
        self.events_before = self.timing.events
        self.last, self.disturbed = now, False
        if self.trial is None and not self.full_rate and len(self.intervals) == MOST_COUNTED:
            self.full_rate = self.rate

    def _costs_changed(self) -> bool:
        """Whether the times differ from those under which the present rates were measured, or the rate has fallen. A
        try changes some of them itself."""
        former = self.operation if self.trial is None else self.trial.former
        point = self.timing.point(self.point.rows)
        if former.micro_batch != self.operation.micro_batch:
            point = replace(point, update_s=0.0)
        if (former.off, former.together) != (self.operation.off, self.operation.together):
            point = replace(point, update_s=0.0, pass_s=0.0)  # as if alone on the device, which holds about
        pairs = zip(astuple(point), astuple(self.point), strict=True)
        # 0: not known at present
        drifted = any(min(new, old) > 0.0 and abs(new - old) > self.tolerance.drift * old for new, old in pairs)
        self.drifted = self.drifted + 1 if drifted else 0
        if self.drifted >= DRIFTED:
            return True
        if not self.point.rows and point.rows:
            self._measure_anew()
        self.point = point.updated(self.point)
        measured = self.trial is None and len(self.intervals) == MOST_COUNTED
        return measured and self.rate < (1.0 - self.tolerance.unexplained) * self.full_rate

    def _start_over(self) -> list[MoveChosen]:
        """Costs have changed: what was measured and forecast does not hold any more, and α is the setting's again."""
        trial, self.search, self.trial, self.next_search = self.trial, None, None, 0
        self.barred.clear()
        self.timing.forget_costs()
        self.point, self.drifted = TimingPoint(), 0
        self.lost_s = self.undone_s = self.saved_s = 0.0
        self._measure_anew()
        before, former = self.operation, self.operation if trial is None else trial.former
        self.roomier += [former] * before.needs_more(former)
        self.operation = replace(before, max_lag=self.settings.max_lag)
        if not (move := before.describe(self.operation) or former.describe(self.operation)):
            return []
        reason = "the stations' times, or the rate, have changed: all is measured anew"
        return [MoveChosen("reset", move, reason, 1.0 if trial is None else trial.gain)]

    def _measure_anew(self) -> None:
        self.intervals.clear()
        self.skip, self.full_rate = self.catch_up, 0.0

    # ------------------------------------------------------------ choosing

    def _may_search(self) -> bool:
        """Whether it is time for forecasts: already while the versions are measured that decide, on a try that wins."""
        if self.trial is not None:
            return self.rate > self.trial.rate
        return self.versions >= self.next_search and bool(self.intervals)

    def _begin_search(self, now: float, limits: BatchLimits) -> None:
        if self.timing.generators.keys() <= set(self.operation.off):
            return  # those that are on are lost, and all others serve until one is back
        times = self.timing.measured()
        timing = self.timing
        found = neighbours(self.operation, timing.generators, self.settings, self.rules, timing.updates)
        found = [one for one in found if self.barred.get(one, 0) <= self.versions and not self._failed(one)]
        if times is None or not found:
            self.next_search = self.versions + (PAUSE if not found else 1)
            return
        times = replace(times, version_s=fmean(self.intervals), events=self.version_events)
        self.search = MoveSearch(times, limits, now, [*reversed(found), self.operation])

    def _failed(self, one: Operation) -> bool:
        """Whether it needs more memory than the present operation, and as much as one that failed."""
        as_much = any(not failed.needs_more(one) for failed in self.failed)
        return as_much and one.needs_more(self.operation)

    def _choose(self, search: MoveSearch, now: float) -> list[MoveChosen]:
        """Begin the move that promises most, or lower α where that costs nothing."""
        settled = len(self.intervals) == MOST_COUNTED  # else the trainer may still catch up with what was made before
        self.search, self.next_search = None, self.versions + (PAUSE if settled else 1)
        here = search.found.get(self.operation)
        if here is None or not here.samples_per_s or not self.rate:
            return []
        gains = {one: found.samples_per_s / here.samples_per_s for one, found in search.found.items()}
        error = abs(here.samples_per_s / self.rate - 1.0)
        sizes = search.times.updates
        guessed = {one for one in gains if one.micro_batch not in sizes and len(sizes) < 2}
        least = {one: 1.0 + (MIN_GUESSED if one in guessed else MIN_GAIN + error / 2) for one in gains}
        better = [one for one, gain in gains.items() if gain >= least[one]]
        best, fresher = max(better, key=lambda one: (gains[one], one.max_lag), default=self.operation), not better
        if fresher:
            most = (1.0 - LESS_LAG) * here.lag
            less = [one for one, found in search.found.items() if found.lag <= most and gains[one] >= 1.0 - EQUAL / 2]
            less = [one for one in less if one.off == self.operation.off and one.max_lag < self.operation.max_lag]
            if not less or not settled:
                return []
            best = min(less, key=lambda one: search.found[one].lag)
        version_s = fmean(self.intervals)
        missing_s = self.lost_s - TRIES_SHARE * (now - self.began)
        missing_s += version_s if error > self.tolerance.accurate else 0.0
        if missing_s > 0.0:
            wait = ceil(missing_s / (TRIES_SHARE * version_s + self.saved_s))
            if wait <= COUNTED:
                self.search = search
            self.next_search = self.versions + min(PAUSE, wait)
            return []
        times, found, off = search.times, search.found[best], f"{error:.0%}"
        reason = (
            f"a pass takes {1e3 * times.base_s:.3g} ms + {1e3 * times.per_row_s:.3g} ms per row, an update "
            f"{times.update_s:.3g} s; {self.rate:.4g} samples/s are measured and {here.samples_per_s:.4g} forecast "
            f"({off} off), with the move {found.samples_per_s:.4g}"
        )
        reason += f", and a lag of {found.lag:.2g} instead of {here.lag:.2g} versions" if fresher else ""
        self.trial = MoveTrial(self.operation, self.rate, gains[best], fresher, self.intervals.copy())
        self.undone_s = 0.0
        move, self.operation = self.operation.describe(best), best
        self._measure_anew()
        return [MoveChosen("begun", move, reason, gains[best])]

    # ------------------------------------------------------------ results

    def _check_trial(self, trial: MoveTrial) -> list[MoveChosen]:
        counted = len(self.intervals)
        ratio = self.rate / trial.rate if counted else 1.0
        lost = trial.excess_s * trial.rate / self.settings.version_samples
        if lost > self.tolerance.allowed or self._trains_longer(trial):
            return [self._undo(trial, ratio)]
        least = 1.0 - EQUAL if trial.fresher else 1.0 + MIN_MEASURED
        unclear = trial.fresher or abs(ratio - least) < UNCLEAR
        if counted < (MOST_COUNTED if unclear else COUNTED):
            return []
        if ratio < least:
            return [self._undo(trial, ratio)]
        self.roomier += [trial.former] * self.operation.needs_more(trial.former)
        saved_s = (1.0 / trial.rate - 1.0 / self.rate) * self.settings.version_samples
        self.saved_s = max(0.0, self.saved_s + saved_s)  # α may have been lowered at a slightly lower rate
        self.trial, self.next_search, self.point = None, 0, self.point.updated(self.timing.point(self.point.rows))
        return [self._result("kept", trial, trial.former.describe(self.operation), ratio)]

    def _trains_longer(self, trial: MoveTrial) -> bool:
        """Whether two updates with micro-batches of another size took longer: then no version can be shorter."""
        updates, former, size = self.timing.updates, trial.former.micro_batch, self.operation.micro_batch
        if former == size or former not in updates or len(updates[size].values if size in updates else ()) < 2:
            return False
        return updates[size].middle > (1.0 + UNCLEAR) * updates[former].middle

    def _undo(self, trial: MoveTrial, ratio: float) -> MoveChosen:
        tried, self.operation = self.operation, trial.former
        self.barred[tried] = self.versions + BARRED
        self.lost_s += trial.excess_s
        self.undone_s = self.settings.version_samples / trial.rate
        self.trial, self.search, self.next_search = None, None, self.versions + 1
        self._measure_anew()
        self.intervals = trial.intervals
        return self._result("undone", trial, tried.describe(self.operation), ratio)

    def _undo_kept(self, failed: Operation) -> MoveChosen | None:
        """Go back to the memory of before the latest kept move that needs more; None if there is none."""
        less = next((one for one in reversed(self.roomier) if failed.needs_more(one)), None)
        if less is None:
            return None
        del self.roomier[self.roomier.index(less) :]
        size, together = min(failed.micro_batch, less.micro_batch), failed.together and less.together
        former, lag = failed if self.trial is None else self.trial.former, self.settings.max_lag
        self.operation = replace(former, max_lag=lag, micro_batch=size, together=together)
        self.trial, self.search, self.next_search = None, None, self.versions + 1
        self.point, self.drifted, self.saved_s = TimingPoint(), 0, 0.0
        self._measure_anew()
        return MoveChosen("undone", failed.describe(self.operation), "", 1.0)

    @staticmethod
    def _result(outcome: Literal["kept", "undone"], trial: MoveTrial, move: str, ratio: float) -> MoveChosen:
        reason = f"{ratio:.3g} times the rate before it is measured, {trial.gain:.3g} was forecast"
        return MoveChosen(outcome, move, reason, trial.gain, ratio)
