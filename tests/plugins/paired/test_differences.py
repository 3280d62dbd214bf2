"""Differences of two policies that played the same episodes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from polyrhythm.plugins.paired.differences import difference, mcnemar, newcombe, pair_up


def _episode(
    index: int, success: bool | None, earned: float = 0.0, sample: int = 0, task: str = "push"
) -> dict[str, Any]:
    own = {"index": index, "sample": sample, "seed": 100 + index, "task": task, "greedy": True}
    return {**own, "success": success, "return": earned, "steps": 3}


def test_newcombe_gives_published_numbers() -> None:
    """The pairs of Bentur et al. 2009, in Fagerland, Lydersen and Laake 2014 (Statistics in Medicine 33)."""
    assert newcombe(1, 1, 7, 12) == pytest.approx((0.026, 0.507), abs=5e-4)
    low, high = newcombe(1, 7, 1, 12)
    assert (low, high) == pytest.approx((-0.507, -0.026), abs=5e-4)


def test_equal_outcomes_keep_a_width_and_swapping_mirrors_it() -> None:
    for counts in ((10, 0, 0, 0), (0, 0, 0, 10), (5, 0, 0, 5)):
        low, high = newcombe(*counts)
        assert low < 0 < high
        assert low == pytest.approx(-high)
    assert newcombe(30, 5, 12, 17) == pytest.approx([-x for x in reversed(newcombe(30, 12, 5, 17))])
    assert newcombe(0, 0, 10, 0)[1] == pytest.approx(1)


def test_newcombe_covers_the_truth_and_is_narrower_where_pairs_agree() -> None:
    rng, covered = random.Random(0), 0
    for _ in range(400):
        counts = dict.fromkeys(((True, True), (True, False), (False, True), (False, False)), 0)
        for _ in range(64):
            u = rng.random()
            v = u if rng.random() < 0.5 else rng.random()
            counts[u < 0.6, v < 0.7] += 1
        low, high = newcombe(*counts.values())
        covered += low <= 0.1 <= high
    assert covered >= 0.92 * 400
    alike, apart = newcombe(45, 0, 5, 50), newcombe(20, 25, 30, 25)
    assert alike[1] - alike[0] < 0.6 * (apart[1] - apart[0])


@pytest.mark.parametrize(("only_a", "only_b", "p"), [(2, 9, 0.0654), (0, 0, 1.0), (5, 5, 1.0), (0, 6, 0.03125)])
def test_mcnemar_is_exact(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == mcnemar(only_b, only_a) == pytest.approx(p, abs=1e-4)


def test_pairs_are_equal_episodes_and_others_are_left_out() -> None:
    a = [_episode(0, True), _episode(1, False), _episode(2, None)]
    b = [_episode(1, True), _episode(2, True), _episode(3, True)]
    found = difference(pairs := pair_up(a, b))
    assert [pair.success for pair in pairs] == [(False, True), (False, True)]
    assert found["success"]["only_b"] == found["pairs"] == 2
    other = [{**one, "seed": one["seed"] + 1} for one in b]
    assert pair_up(a, other) == []


def test_without_success_the_return_decides() -> None:
    a, b = ([_episode(index, None, base + index) for index in range(3)] for base in (0.0, 1.5))
    found = difference(pair_up(a, b))
    assert found["success"] is None
    assert [found["return"][name] for name in ("difference", "low", "high")] == [1.5, None, None]


@pytest.mark.parametrize(
    ("returns", "has"),
    [
        ([(0.0, 5.0)], False),
        ([(0.0, 5.0)] * 3, False),
        ([(0.0, 0.0)] * 3, False),
        ([(0.1, 0.3), (0.7, 0.9), (1.1, 1.3)], False),
        ([(0.0, 5.0), (0.0, 5.0), (0.0, 5.001)], True),
        ([(1e-6, 2e-6), (1e-6, 4e-6)], True),
    ],
)
def test_a_difference_without_variance_has_no_interval(returns: list[tuple[float, float]], has: bool) -> None:
    """Nor has one of rounding alone: 0.3 - 0.1 is not 0.9 - 0.7."""
    a, b = ([_episode(index, None, own[side]) for index, own in enumerate(returns)] for side in (0, 1))
    found = difference(pair_up(a, b))["return"]
    assert (found["low"] is not None, found["high"] is not None) == (has, has)


def test_samples_of_one_state_alone_have_no_interval_of_return() -> None:
    a, b = ([_episode(0, None, base * sample, sample) for sample in range(4)] for base in (1.0, 2.0))
    assert difference(pair_up(a, b))["return"]["low"] is None


def test_samples_of_one_state_count_as_little_as_they_vary() -> None:
    def sampled(alike: bool) -> dict[str, Any]:
        rng = random.Random(1)
        pairs = []
        for index in range(20):
            state = rng.random() < 0.5
            for sample in range(8):
                better = state if alike else rng.random() < 0.5
                pairs.append((_episode(index, False, 0.0, sample), _episode(index, better, 1.0, sample)))
        found: dict[str, Any] = difference(pair_up(*zip(*pairs, strict=True)))["success"]
        return found

    alike, apart = sampled(True), sampled(False)
    assert alike["p"] is apart["p"] is None
    assert alike["high"] - alike["low"] > 1.8 * (apart["high"] - apart["low"])
