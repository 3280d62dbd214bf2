"""The forecast against arithmetic, and against what the whole simulated cluster does under the same laws."""

from __future__ import annotations

import random

import pytest

from polyrhythm.plugins.autobatch.forecast import ClosedLoop, Forecast
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.workloads.batching_scenario import BatchingScenario, rate


def loop(
    away: list[list[float]], base: float, per_row: float = 0.0, *, generators: int = 1, rows: int = 1
) -> ClosedLoop:
    waiting = [(0.0, slot) for slot in range(len(away))]
    return ClosedLoop([rows] * len(away), away, generators, base, per_row, waiting=waiting)


def forecast(of: ClosedLoop, limits: BatchLimits, *, together: bool = True) -> float:
    slots = len(of.rows)
    play = Forecast(of, limits, 4 * slots, 20 * slots, together)
    play.advance(1_000_000)
    return play.rate


def test_lockstep_is_rows_by_step_and_pass() -> None:
    of = loop([[0.010]] * 8, 0.030, 0.001, rows=2)
    assert forecast(of, BatchLimits(10**6, 10**6, 1.0)) == pytest.approx(16 / (0.010 + 0.030 + 16 * 0.001))


def test_a_full_generator_serves_its_largest_batch_without_a_pause() -> None:
    of = loop([[0.001]] * 8, 0.030, 0.001)
    assert forecast(of, BatchLimits(4, 10**6, 1.0)) == pytest.approx(4 / 0.034)
    assert forecast(of, BatchLimits(10**6, 2, 1.0)) == pytest.approx(2 / 0.032)


def test_two_groups_that_never_wait_stay_two() -> None:
    """Why the forecast begins with the present: served at once, those in the queue never meet those in the pass."""
    of = loop([[0.010]] * 4, 0.030)
    of.waiting[:] = [(-0.020, 2), (-0.020, 3)]
    of.passes[:] = [(0.010, (0, 1))]
    limits = BatchLimits(10**6, 10**6, 0.010)
    assert forecast(of, limits) == pytest.approx(4 / 0.040)
    assert forecast(of, limits, together=False) == pytest.approx(4 / 0.060)
    assert forecast(of, BatchLimits(10**6, 10**6, 0.040), together=False) == pytest.approx(4 / 0.040)


def test_slices_give_the_same_as_one_run() -> None:
    rng = random.Random(0)
    away = [[rng.expovariate(100.0) for _ in range(16)] for _ in range(8)]
    of = loop(away, 0.010, 0.001, generators=2)
    whole, sliced = (Forecast(of, BatchLimits(4, 10**6, 0.002), 16, 160, together=True) for _ in range(2))
    whole.advance(10_000)
    while not sliced.rate:
        sliced.advance(3)
    assert sliced.rate == whole.rate


@pytest.mark.parametrize(
    "scene",
    [
        BatchingScenario(16, 1, 1, "lognormal:10ms:0.8", "10ms+0.1ms"),
        BatchingScenario(64, 1, 4, "lognormal:10ms:0.8", "10ms+0.1ms"),
        BatchingScenario(16, 4, 2, "normal:10ms:0.3ms", "2ms+1ms"),
    ],
)
@pytest.mark.parametrize("limits", [BatchLimits(10**6, 10**6, 0.0), BatchLimits(32, 10**6, 0.003)])
def test_it_foretells_the_simulated_cluster(scene: BatchingScenario, limits: BatchLimits) -> None:
    rng, law = random.Random(1), parse_distribution(scene.step)
    away = [[law.sample(rng) for _ in range(64)] for _ in range(scene.slots)]
    base, per_row = (0.002, 0.001) if scene.serve == "2ms+1ms" else (0.010, 0.0001)
    of = loop(away, base, per_row, generators=scene.generators, rows=scene.rows)
    scheduler = SchedulerSettings(64, max_lag=1e6, bound="mean", max_rows=limits.max_rows, max_wait_s=limits.max_wait_s)
    assert forecast(of, limits) == pytest.approx(rate(scene, scheduler, 0, "short"), rel=0.06)
