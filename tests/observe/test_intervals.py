from __future__ import annotations

import math
from statistics import variance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.observe.intervals import percent, student, success_rate, wilson
from polyrhythm.readable import counted


@pytest.mark.parametrize(
    ("successes", "episodes", "low", "high"),
    [
        (29, 160, 0.1293, 0.2482),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
        (117, 160, 0.6577, 0.7939),
        (1, 1, 0.2065, 1.0),
    ],
)
def test_golden_numbers(successes: int, episodes: int, low: float, high: float) -> None:
    interval = wilson(successes, episodes)
    assert interval.low == pytest.approx(low, abs=1e-4)
    assert interval.high == pytest.approx(high, abs=1e-4)
    assert interval.rate == successes / episodes
    assert (interval.successes, interval.episodes) == (successes, episodes)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_rate_and_mirrors(pair: tuple[int, int]) -> None:
    successes, episodes = pair
    interval = wilson(successes, episodes)
    assert 0 <= interval.low <= interval.rate <= interval.high <= 1
    assert interval.low < interval.high
    mirror = wilson(episodes - successes, episodes)
    assert mirror.low == pytest.approx(1 - interval.high, abs=1e-12)


@pytest.mark.parametrize(("successes", "episodes"), [(0, 0), (3, 2), (-1, 2)])
def test_impossible_counts(successes: int, episodes: int) -> None:
    with pytest.raises(ValueError, match="successes of"):
        wilson(successes, episodes)


@pytest.mark.parametrize(
    ("successes", "found"),
    [
        ([True, False], (1, 2, 0.5)),
        ([False, False], (0, 2, 0.0)),
        ([None, True, None], (1, 3, 1 / 3)),
        ([None, False], (0, 2, 0.0)),
        ([None, None], (None, 2, None)),
    ],
)
def test_a_rate_is_null_only_if_no_episode_reports_success(
    successes: list[bool | None], found: tuple[int | None, int, float | None]
) -> None:
    rate = success_rate(successes)
    assert (rate["successes"], rate["episodes"], rate["rate"]) == found
    assert (rate["low"] is None) == (rate["high"] is None) == (found[2] is None)


def test_one_is_no_plural() -> None:
    assert [counted(count, "episode") for count in (0, 1, 2)] == ["0 episodes", "1 episode", "2 episodes"]


def test_almost_all_is_not_all() -> None:
    assert [percent(share) for share in (0.0, 0.004, 0.731, 510 / 512, 1.0)] == ["0", "0.4", "73", "99.6", "100"]


def test_student_s_interval_of_a_mean() -> None:
    assert student([0.7, 0.8, 0.9]) == pytest.approx((0.8, 0.551586, 1.048414), abs=1e-6)
    assert student([3.0]) == (3.0, 3.0, 3.0)
    assert student([2.0, 2.0]) == (2.0, 2.0, 2.0)
    for count, quantile in ((2, 12.7062), (5, 2.77645), (6, 2.57058), (11, 2.22814), (31, 2.04227), (201, 1.97190)):
        values = [float(i) for i in range(count)]
        mean, low, high = student(values)
        half = quantile * math.sqrt(variance(values) / count)
        assert high - mean == pytest.approx(half, rel=2e-3)
        assert mean - low == pytest.approx(half, rel=2e-3)
