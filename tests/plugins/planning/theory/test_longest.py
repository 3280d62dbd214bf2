"""The longest of several draws, against expectations that are known."""

from __future__ import annotations

import pytest

from polyrhythm.plugins.planning.theory import expected_longest, expected_maximum
from polyrhythm.specs.distributions import parse_distribution


def test_the_maximum_of_draws_with_replacement_by_hand() -> None:
    assert expected_maximum([1.0, 3.0], 1) == 2.0
    assert expected_maximum([1.0, 3.0], 2) == 2.5
    assert expected_maximum([1.0, 2.0, 6.0], 2) == pytest.approx((1 * 1 + 2 * 3 + 6 * 5) / 9)


def test_laws_whose_longest_is_known() -> None:
    assert expected_longest(parse_distribution("constant:2s"), 100) == pytest.approx(2.0)
    # Of n exponential times of mean 1: 1 + 1/2 + ... + 1/n.
    harmonic = sum(1 / k for k in range(1, 65))
    assert expected_longest(parse_distribution("gamma:1s:1"), 64) == pytest.approx(harmonic, rel=0.02)
    # One of ten is long: with 20 samples, all but 0.9^20 of the time at least one.
    law = parse_distribution("mixture:0.9*constant:1s+0.1*constant:5s")
    assert expected_longest(law, 20) == pytest.approx(5 - 4 * 0.9**20, rel=0.01)


def test_it_grows_with_the_samples_and_is_the_same_for_the_same_seed() -> None:
    law = parse_distribution("lognormal:1s:0.8")
    found = [expected_longest(law, samples) for samples in (1, 8, 64, 512)]
    assert found == sorted(found)
    assert found[0] == pytest.approx(1.0, rel=0.03)
    assert expected_longest(law, 8) == found[1] != expected_longest(law, 8, seed=1)


def test_no_samples_have_no_longest() -> None:
    with pytest.raises(ValueError, match="samples is 0; make it at least 1"):
        expected_longest(parse_distribution("constant:1s"), 0)
