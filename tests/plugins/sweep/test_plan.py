"""Which run of a sweep is next."""

from __future__ import annotations

import random
from typing import Any

import pytest

from polyrhythm.plugins.sweep.plan import (
    Every,
    Halving,
    JobResult,
    Proposed,
    SweepJob,
    SweepPlan,
    differ,
    rank,
    rounds,
    scores,
)


def _success(successes: int, episodes: int = 100) -> JobResult:
    from polyrhythm.observe.intervals import wilson

    return JobResult({**wilson(successes, episodes)._asdict(), "mean_return": successes / episodes})


def _return(earned: float) -> JobResult:
    return JobResult({"rate": None, "low": None, "high": None, "mean_return": earned, "episodes": 10})


FAILED = JobResult(None, "killed by signal 9")
NAMES: Any = [{"lr": str(number)} for number in range(8)]


def _drive(plan: SweepPlan, quality: Any, seed: int = 0) -> list[SweepJob]:
    """Runs a plan with two jobs at once, which end in random order."""
    rng, under_way, done = random.Random(seed), list[SweepJob](), list[SweepJob]()
    while True:
        while len(under_way) < 2 and (job := plan.next()) is not None:
            under_way.append(job)
        if not under_way:
            return done
        job = under_way.pop(rng.randrange(len(under_way)))
        done.append(job)
        plan.end(job, quality(job))


def test_every_combination_runs_with_every_seed() -> None:
    done = _drive(Every(NAMES[:3], [5, 6]), lambda job: _success(50))
    assert sorted(done) == [SweepJob(number, seed) for number in range(3) for seed in (5, 6)]


@pytest.mark.parametrize("order", range(3))
def test_halving_keeps_the_better_half_whatever_the_order(order: int) -> None:
    done = _drive(Halving(NAMES, [1, 2], 80), lambda job: _success(10 * job.combination + 5), order)
    by_versions = {v: sorted({job.combination for job in done if job.versions == v}) for v in (10, 20, 40, 80)}
    assert by_versions == {10: list(range(8)), 20: [4, 5, 6, 7], 40: [6, 7], 80: [7]}
    assert len(done) == 2 * (8 + 4 + 2 + 1)


def test_halving_drops_what_fails_and_ends_where_all_do() -> None:
    done = _drive(Halving(NAMES[:4], [1], 4), lambda job: FAILED if job.combination else _success(1))
    assert [job.versions for job in done if job.combination == 0] == [1, 2, 4]
    assert len(_drive(Halving(NAMES[:4], [1], 4), lambda job: FAILED)) == 4


@pytest.mark.parametrize(
    ("combinations", "versions", "found"),
    [(8, 80, [10, 20, 40, 80]), (1, 5, [5]), (3, 5, [2, 5]), (8, 2, [1, 2]), (100, 1, [1])],
)
def test_rounds_double_up_to_all_versions(combinations: int, versions: int, found: list[int]) -> None:
    assert rounds(combinations, versions) == found


def test_the_lower_end_ranks_and_a_failure_is_last() -> None:
    sure, unsure = [_success(60, 100)], [_success(7, 10)]
    assert rank({0: unsure, 1: sure, 2: [FAILED]}) == [1, 0, 2]
    steady, unsteady = [_success(80), _success(80)], [_success(100), _success(62)]
    assert rank({0: unsteady, 1: steady}) == [1, 0]
    assert rank({0: [_success(99), FAILED], 1: [_success(1), _success(1)]}) == [1, 0]
    assert rank({0: [_success(5)], 1: [_success(5)]}) == [0, 1]


def test_the_variance_of_returns_is_pooled() -> None:
    found = scores({0: [_return(60), _return(104)], 1: [_return(159), _return(92)]})
    first, second = found[0], found[1]
    assert first is not None
    assert second is not None
    assert second.low > first.low
    assert first.high - first.low == pytest.approx(second.high - second.low)
    assert scores({0: [_return(7)]})[0] == (7, 7, 7, False)


def test_an_optimizer_gets_a_score_when_all_seeds_have_ended() -> None:
    told = list[Any]()
    plan = Proposed(3, [1, 2], lambda: {"lr": str(len(told))}, lambda number, low: told.append((number, low)))
    _drive(plan, lambda job: FAILED if job.combination == 1 and job.seed == 2 else _success(50))
    assert sorted(number for number, _ in told) == [0, 1, 2]
    assert dict(told)[1] is None
    assert 0.3 < dict(told)[0] < 0.5


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        ([_success(95)], [_success(60)], True),
        ([_success(95)], [_success(95)], False),
        ([_success(95)], [_success(90)], False),
        ([_return(500.0)] * 2, [_return(20.0)] * 2, False),
        ([_return(500.0), _return(498.0)], [_return(20.0), _return(22.0)], True),
        ([_return(500.0)], [_return(20.0)], False),
    ],
)
def test_a_difference_is_shown_by_intervals_apart(first: Any, second: Any, shown: bool) -> None:
    a, b = scores({0: first, 1: second}).values()
    assert a is not None
    assert b is not None
    assert differ(a, b) is differ(b, a) is shown
