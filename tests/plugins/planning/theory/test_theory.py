"""The bounds against cases worked out by hand, in their limits, and against the simulated cluster."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyrhythm.plugins.planning import theory
from polyrhythm.plugins.planning.theory import Workload
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.plugins.virtual.simulate import simulate

#: N = 8 samples of 10 s, at most 20 s, on 4 workers; each is trained on twice, 3 s each time.
WORK = Workload(samples=8, workers=4, rollout_s=10.0, longest_s=20.0, train_s=3.0, passes=2)


def test_the_bounds_by_hand() -> None:
    assert theory.completion_bound(10, 4, 2.0, 5.0) == 10.0
    assert (WORK.generating_s, WORK.training_s) == (20.0, 12.0)
    assert theory.synchronous_bound(WORK) == 52.0
    # α = 1: (11) is 20 + 12 + 20/2 and β* = 12 / 42; (9) at β = 1/4: the larger of 20/0.75 + 10/0.75 and 12/0.25.
    assert theory.balanced_bound(WORK, 1.0) == 42.0
    assert theory.best_share(WORK, 1.0) == pytest.approx(2 / 7)
    assert theory.asynchronous_bound(WORK, 1.0, 0.25) == pytest.approx(48.0)
    assert theory.asynchronous_bound(WORK, 1.0, 0.5) == pytest.approx(60.0)
    assert theory.speed_up_limit(WORK) == pytest.approx(52 / 32)


def test_the_floors_and_the_paced_bound_by_hand() -> None:
    assert theory.synchronous_floor(WORK) == 32.0
    assert theory.synchronous_floor(WORK, reached_s=25.0) == 37.0
    assert theory.asynchronous_floor(WORK, 0.25) == 48.0
    assert theory.asynchronous_floor(WORK, 0.5) == 40.0
    # β = 1/2: g = 40, t = 24, L = 20. α = 1.5 is two versions: 40 + 44/2; α = 0: the sum.
    assert theory.paced_bound(WORK, 1.5, 0.5) == 62.0
    assert theory.paced_bound(WORK, 0.0, 0.5) == 84.0
    # β = 1/4: training alone takes 48, g + (t + L)/100 only 27.
    assert theory.paced_bound(WORK, 99.0, 0.25) == 48.0


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    seconds = st.floats(1e-3, 1e3)
    mean = draw(seconds)
    return Workload(
        samples=draw(st.integers(1, 5000)),
        workers=draw(st.integers(2, 500)),
        rollout_s=mean,
        longest_s=mean * draw(st.floats(1.0, 100.0)),
        train_s=draw(seconds),
        passes=draw(st.integers(1, 8)),
    )


@given(workloads(), st.floats(0.0, 50.0))
def test_limits_and_the_best_share(work: Workload, max_lag: float) -> None:
    share, balanced = theory.best_share(work, max_lag), theory.balanced_bound(work, max_lag)
    assert 0 < share < 1
    assert theory.asynchronous_bound(work, max_lag, share) == pytest.approx(balanced)
    for other in (share / 2, (1 + share) / 2):
        assert theory.asynchronous_bound(work, max_lag, other) > balanced * (1 - 1e-9)
    assert theory.balanced_bound(work, 0.0) == theory.synchronous_bound(work)
    assert theory.balanced_bound(work, max_lag) <= theory.synchronous_bound(work)
    endless = theory.balanced_bound(work, 1e12)
    assert endless == pytest.approx(work.generating_s + work.training_s)
    assert theory.synchronous_bound(work) / endless == pytest.approx(theory.speed_up_limit(work))
    pace = theory.best_share(work, 1e12)
    assert theory.asynchronous_floor(work, pace) == pytest.approx(endless)
    assert theory.asynchronous_floor(work, share) <= theory.asynchronous_bound(work, max_lag, share)


def test_with_a_worker_for_each_sample_the_rollout_alone_gains_at_most_one_and_the_tail() -> None:
    work = replace(WORK, samples=4, train_s=1e-12)
    assert theory.speed_up_limit(work) == pytest.approx((20.0 + 10.0) / 10.0)


def test_whole_workers() -> None:
    # (9) at 1, 2, 3 of 4: 48, 60, 120 s. The floor: 48, 40, 80 s.
    assert theory.best_split(WORK, partial(theory.asynchronous_bound, WORK, 1.0)) == 1
    assert theory.best_split(WORK, partial(theory.asynchronous_floor, WORK)) == 2
    with pytest.raises(ValueError, match="workers is 1; it takes 2"):
        theory.best_split(replace(WORK, workers=1), math.sqrt)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 0}, "samples is 0; make it at least 1"),
        ({"workers": 0}, "workers is 0; make it at least 1"),
        ({"rollout_s": 0.0}, "rollout is 0; make it more than 0"),
        ({"longest_s": 9.0}, "longest is 9; make it at least the mean, 10"),
        ({"longest_s": math.inf}, "longest is inf; make it finite"),
        ({"train_s": -1.0}, "train is -1; make it more than 0"),
        ({"passes": 0}, "passes is 0; make it at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(WORK, **change)


def test_lag_and_share_are_checked() -> None:
    with pytest.raises(ValueError, match="max_lag is -1; make it 0 or more"):
        theory.best_share(WORK, -1.0)
    with pytest.raises(ValueError, match="max_lag is inf; make it 0 or more, and finite"):
        theory.balanced_bound(WORK, math.inf)
    with pytest.raises(ValueError, match="share is 1; "):
        theory.asynchronous_floor(WORK, 1.0)


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=60), st.integers(1, 20))
def test_proposition_1_bounds_every_queue(times: list[float], workers: int) -> None:
    """Each worker takes the next sample the moment it is free."""
    free = [0.0] * workers
    for seconds in times:
        heapq.heapreplace(free, free[0] + seconds)
    bound = theory.completion_bound(len(times), workers, math.fsum(times) / len(times), max(times) * (1 - 1 / workers))
    assert max(free) <= bound * (1 + 1e-9)


# ---------------------------------------------------------------- beside the real conductor

#: Laws with an end, and where it is.
LAWS = {
    "constant:1s": 1.0,
    "mixture:0.5*constant:0.5s+0.5*constant:1.5s": 1.5,
    "mixture:0.9*constant:0.5s+0.1*constant:5.5s": 5.5,
    "mixture:0.3*constant:0.1s+0.3*constant:1s+0.4*constant:2s": 2.0,
}


def _simulated(
    law: str, samples: int, slots: int, update_s: float, max_lag: float, bound: str, versions: int, seed: int = 0
) -> tuple[float, float]:
    """Seconds of the whole run, and the mean of the times that were drawn in it."""
    summary = simulate(
        ClusterSettings.model_validate(
            {
                "seed": seed,
                "versions": versions,
                "scheduler": {
                    "batch_size": samples,
                    "max_lag": max_lag,
                    "bound": bound,
                    "on_update": "continue" if max_lag else "drain",
                    "max_rows": 1,
                    "max_wait_s": 0.0,
                    "seed": seed,
                },
                "simulators": [{"env_batches": slots, "episode_time": law}],
                "generators": [{}],
                "trainer": {"update": f"{update_s:.9f}s"},
            }
        )
    )
    assert summary["ledger"]["trained"] == versions * samples
    return summary["virtual_s"], summary["time"]["slots"]["stepping"]["s"] / (versions * samples)


@given(
    law=st.sampled_from(sorted(LAWS)),
    samples=st.sampled_from((1, 3, 8, 16)),
    workers=st.sampled_from((1, 2, 5, 16, 40)),
    train_s=st.sampled_from((0.01, 0.3, 2.0)),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_no_synchronous_run_is_longer_than_8_or_shorter_than_its_floor(
    law: str, samples: int, workers: int, train_s: float, seed: int
) -> None:
    versions, update_s = 5, samples * train_s / workers
    run_s, mean_s = _simulated(law, samples, workers, update_s, 0.0, "sample", versions, seed)
    work = Workload(samples, workers, mean_s, LAWS[law], train_s)
    assert theory.synchronous_floor(work) * versions <= run_s * (1 + 1e-9)
    assert run_s <= theory.synchronous_bound(work) * versions * (1 + 1e-9)


@given(
    law=st.sampled_from(sorted(LAWS)),
    samples=st.sampled_from((1, 3, 8, 16)),
    workers=st.sampled_from((2, 5, 16, 40)),
    part=st.floats(0.05, 0.95),
    pace=st.sampled_from((0.1, 0.5, 0.9, 1.0, 1.1, 2.0)),
    max_lag=st.sampled_from((0.0, 0.5, 1.0, 1.5, 2.0, 4.0)),
    bound=st.sampled_from(("sample", "mean")),
    seed=st.integers(0, 99),
)
@example("constant:1s", 16, 40, 0.8, 0.9, 1.0, "sample", 0)
@settings(max_examples=40)
def test_what_pacing_keeps(
    law: str, samples: int, workers: int, part: float, pace: float, max_lag: float, bound: str, seed: int
) -> None:
    """For certain g + max(t, (t + L)/n) a version, and the paced bound where times do not vary, once the run is going.

    pace: the time of an update over that of generation.
    """
    versions, longest_s = 12, LAWS[law]
    training = min(workers - 1, max(1, round(part * workers)))
    generation_s = samples / (workers - training) + longest_s / (max_lag + 1)
    train_s = pace * generation_s * training / samples
    run_s, mean_s = _simulated(law, samples, workers - training, pace * generation_s, max_lag, bound, versions, seed)
    work, share = Workload(samples, workers, mean_s, longest_s, train_s), training / workers
    paced_s = theory.paced_bound(work, max_lag, share)
    if law.startswith("constant"):
        assert run_s <= versions * paced_s * (1 + 1e-6) + work.generating_s / (1 - share) + longest_s
    update_s, ahead = work.training_s / share, math.floor(max_lag) + 1
    certain_s = work.generating_s / (1 - share) + max(update_s, (update_s + longest_s) / ahead)
    assert run_s <= versions * certain_s * (1 + 1e-6) + longest_s
    assert versions * theory.asynchronous_floor(work, share) <= run_s * (1 + 1e-6)


def test_9_holds_at_equal_pace_and_not_everywhere() -> None:
    """Where the workers are split at equal pace and α is 1 or more; and a setting that exceeds it by a quarter."""
    rng, versions = random.Random(5), 30
    for seed in range(12):
        law, samples, workers = rng.choice(sorted(LAWS)), rng.choice((8, 16)), rng.choice((4, 16, 32))
        work = Workload(samples, workers, 1.0, LAWS[law], rng.choice((0.1, 0.5)))
        training = theory.best_split(work, partial(theory.asynchronous_floor, work))
        share, max_lag, bound = training / workers, rng.choice((1.0, 2.0, 4.0)), rng.choice(("sample", "mean"))
        run_s, mean_s = _simulated(
            law, samples, workers - training, work.training_s / share, max_lag, bound, versions, seed
        )
        bound_s = theory.asynchronous_bound(replace(work, rollout_s=mean_s), max_lag, share)
        assert run_s <= versions * bound_s + LAWS[law] + work.training_s / share

    # Two samples of 1 s on 31 workers, updates of 0.62 s: (9) spreads the tail over two versions, but rollout waits.
    work = Workload(2, 32, 1.0, 1.0, 0.31)
    run_s, _ = _simulated("constant:1s", 2, 31, 0.62, 1.0, "sample", versions)
    assert run_s / versions > 1.25 * theory.asynchronous_bound(work, 1.0, 1 / 32)
    assert run_s <= versions * theory.paced_bound(work, 1.0, 1 / 32) + 1.0
