"""Which run is next: decides from the results so far, without I/O.

A plan is asked for jobs and given their results, in whatever order they end. Asked again from the beginning with the
results that are known, it proposes the same jobs, so a sweep is resumed by asking again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any, NamedTuple, Protocol

from polyrhythm.observe.intervals import mean_share, student_quantile
from polyrhythm.plugins.sweep.space import Combination


class SweepJob(NamedTuple):
    """A run to train. versions: in all, None for the recipe's."""

    combination: int
    seed: int
    versions: int | None = None


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended. tally: of its evaluation after training, None if it failed, with the reason in `failure`."""

    tally: Mapping[str, Any] | None
    failure: str = ""
    wall_s: float = 0.0


class SeedScore(NamedTuple):
    """Success, or return where no success is reported, over the seeds of a combination, with its 95% interval."""

    mean: float
    low: float
    high: float
    is_rate: bool


def scores(results: Mapping[int, Sequence[JobResult]]) -> dict[int, SeedScore | None]:
    """The score of each combination over its seeds that did not fail; None if all did.

    Success: Wilson's interval for the number of independent episodes whose mean would vary as much as that of the seeds
    does, from the number of seeds to that of episodes; of one seed its own. Return: Student's interval, with the
    variance between seeds pooled over all combinations, since two or three seeds say little about it; with one seed
    each it has no width.
    """
    tallies = {number: [one.tally for one in own if one.tally is not None] for number, own in results.items()}
    earned = [[tally["mean_return"] for tally in own] for own in tallies.values()]
    degrees = sum(len(own) - 1 for own in earned if own)
    squares = sum(variance(own) * (len(own) - 1) for own in earned if len(own) > 1)
    deviation = student_quantile(degrees) * math.sqrt(squares / degrees) if degrees else 0.0
    return {number: _score(own, deviation) if own else None for number, own in tallies.items()}


def _score(tallies: Sequence[Mapping[str, Any]], deviation: float) -> SeedScore:
    rates = [tally["rate"] for tally in tallies]
    if None in rates:
        mean, half = fmean(tally["mean_return"] for tally in tallies), deviation / math.sqrt(len(tallies))
        return SeedScore(mean, mean - half, mean + half, is_rate=False)
    if len(tallies) == 1:
        return SeedScore(rates[0], tallies[0]["low"], tallies[0]["high"], is_rate=True)
    found = mean_share(rates, sum(tally["episodes"] for tally in tallies))
    return SeedScore(found["rate"], found["low"], found["high"], is_rate=True)


def differ(a: SeedScore, b: SeedScore) -> bool:
    """Whether a difference is shown: both have an interval, and these do not overlap. A point is no interval."""
    return a.low < a.high and b.low < b.high and (a.high < b.low or b.high < a.low)


def rank(results: Mapping[int, Sequence[JobResult]]) -> list[int]:
    """Combinations by the lower end of their interval, then the mean, then their number; those with a failure last."""
    found = scores(results)

    def worth(number: int) -> tuple[bool, float, float, int]:
        whole = all(result.tally is not None for result in results[number])
        own = found[number]
        return (whole, own.low, own.mean, -number) if own else (whole, -math.inf, -math.inf, -number)

    return sorted(results, key=worth, reverse=True)


class SweepPlan(Protocol):
    """combinations: those proposed so far, by number."""

    combinations: list[Combination]

    def next(self) -> SweepJob | None:
        """The next job; None if there is none until another ends."""

    def end(self, job: SweepJob, result: JobResult) -> None:
        """The job has ended."""


@dataclass(slots=True)
class Every:
    """Each combination with each seed."""

    combinations: list[Combination]
    seeds: Sequence[int]
    _jobs: deque[SweepJob] = field(init=False)

    def __post_init__(self) -> None:
        self._jobs = deque(SweepJob(number, seed) for number in range(len(self.combinations)) for seed in self.seeds)

    def next(self) -> SweepJob | None:
        return self._jobs.popleft() if self._jobs else None

    def end(self, job: SweepJob, result: JobResult) -> None:
        pass


@dataclass(slots=True)
class Halving:
    """Successive halving: all combinations are trained a little, and in each round the better half twice as long.

    The last round has one or two combinations and `versions`. (Jamieson and Talwalkar 2016, AISTATS.)
    """

    combinations: list[Combination]
    seeds: Sequence[int]
    versions: int
    _round: int = field(init=False, default=0)
    _jobs: deque[SweepJob] = field(init=False)
    _ended: dict[SweepJob, JobResult] = field(init=False, default_factory=dict)
    _due: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._jobs = deque()
        self._begin(range(len(self.combinations)))

    @property
    def rounds(self) -> list[int]:
        """Versions of each round."""
        return rounds(len(self.combinations), self.versions)

    def next(self) -> SweepJob | None:
        return self._jobs.popleft() if self._jobs else None

    def end(self, job: SweepJob, result: JobResult) -> None:
        self._ended[job] = result
        if len(self._ended) < self._due or self._round + 1 == len(self.rounds):
            return
        by_combination: dict[int, list[JobResult]] = {}
        for own, found in self._ended.items():
            by_combination.setdefault(own.combination, []).append(found)
        ranked = rank(by_combination)
        whole = [number for number in ranked if all(found.tally is not None for found in by_combination[number])]
        self._round += 1
        self._begin(whole[: math.ceil(len(ranked) / 2)])

    def _begin(self, combinations: Iterable[int]) -> None:
        versions, self._ended = self.rounds[self._round], {}
        self._jobs.extend(SweepJob(number, seed, versions) for number in sorted(combinations) for seed in self.seeds)
        self._due = len(self._jobs)


def rounds(combinations: int, versions: int) -> list[int]:
    """Versions of each round of a halving: doubled from round to round up to `versions`, at least 1 in the first."""
    count = min(max(1, combinations).bit_length() - 1, versions.bit_length() - 1)
    return [max(1, versions >> (count - number)) for number in range(count + 1)]


@dataclass(slots=True)
class Proposed:
    """`count` combinations that an optimizer proposes one after the other, each from the scores of those before.

    propose: the next combination; report: its number and the lower end of its interval, None if it failed.
    """

    count: int
    seeds: Sequence[int]
    propose: Callable[[], Combination]
    report: Callable[[int, float | None], None]
    combinations: list[Combination] = field(default_factory=list)
    _jobs: deque[SweepJob] = field(init=False, default_factory=deque)
    _ended: dict[int, list[JobResult]] = field(init=False, default_factory=dict)

    def next(self) -> SweepJob | None:
        if not self._jobs and len(self.combinations) < self.count:
            number = len(self.combinations)
            self.combinations.append(self.propose())
            self._jobs.extend(SweepJob(number, seed) for seed in self.seeds)
        return self._jobs.popleft() if self._jobs else None

    def end(self, job: SweepJob, result: JobResult) -> None:
        own = self._ended.setdefault(job.combination, [])
        own.append(result)
        if len(own) == len(self.seeds):
            found = scores({job.combination: own})[job.combination]
            failed = found is None or any(result.tally is None for result in own)
            self.report(job.combination, None if failed or found is None else found.low)
