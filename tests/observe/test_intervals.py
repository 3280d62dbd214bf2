from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.observe import wilson
from polyrhythm.observe.intervals import counted, measures_success, percent


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
    ("successes", "returns", "measured"),
    [([0, 2], [1.0, 5.0], True), ([0, 0], [0.0, 5.0], False), ([0.0], [0.0], True), ([0], [None], True), ([], [], 1)],
)
def test_success_is_measured_unless_something_was_earned_and_nothing_succeeded(
    successes: list[float], returns: list[float | None], measured: bool
) -> None:
    assert measures_success(successes, returns) == measured


def test_one_is_no_plural() -> None:
    assert [counted(count, "episode") for count in (0, 1, 2)] == ["0 episodes", "1 episode", "2 episodes"]


def test_almost_all_is_not_all() -> None:
    assert [percent(share) for share in (0.0, 0.004, 0.731, 510 / 512, 1.0)] == ["0", "0.4", "73", "99.6", "100"]
