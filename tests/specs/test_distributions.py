"""Durations written as text: exact means, reproducible draws, errors that say what to write."""

import math
import random

import pytest

from polyrhythm.specs.distributions import parse_distribution, parse_duration

LAWS = {
    "constant:10ms": 0.010,
    "lognormal:10ms:0.8": 0.010,
    "lognormal:10ms:0": 0.010,
    "gamma:10ms:0.5": 0.010,
    "normal:10ms:1ms": 0.010,
    "normal:0ms:5ms": 0.005 * math.sqrt(2 / math.pi),
    "mixture:0.9*lognormal:8ms:0.5+0.1*constant:30ms": 0.9 * 0.008 + 0.1 * 0.030,
}


@pytest.mark.parametrize(("text", "mean"), LAWS.items())
def test_mean_is_the_one_written_and_the_one_drawn(text, mean):
    law = parse_distribution(text)
    assert law.mean == pytest.approx(mean, rel=1e-9)
    rng = random.Random(7)
    draws = [law.sample(rng) for _ in range(40_000)]
    assert min(draws) >= 0.0
    assert sum(draws) / len(draws) == pytest.approx(mean, rel=0.02)


def test_spread_is_the_one_written():
    rng = random.Random(3)
    gamma = [parse_distribution("gamma:10ms:0.5").sample(rng) for _ in range(20_000)]
    mean = sum(gamma) / len(gamma)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in gamma) / len(gamma))
    assert deviation / mean == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize("text", LAWS)
def test_same_random_state_gives_same_draws(text):
    law, again = parse_distribution(text), parse_distribution(text)
    first, second = random.Random(1), random.Random(1)
    assert [law.sample(first) for _ in range(50)] == [again.sample(second) for _ in range(50)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10ms", 0.01), ("1.5s", 1.5), ("250us", 250e-6), ("2min", 120.0), ("5ns", 5e-9), (".5s", 0.5)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "unknown type ''"),
        ("weibull:10ms:1", "unknown type 'weibull'; write constant:10ms"),
        ("constant:10", "duration '10' is not a number with a unit"),
        ("constant:-1ms", "duration '-1ms'"),
        ("lognormal:10ms", "has 1 values instead of 2; write lognormal:10ms:0.8"),
        ("lognormal:0ms:0.8", "duration '0ms' must be above 0"),
        ("lognormal:10ms:nan", "sigma 'nan' is not a plain number"),
        ("gamma:10ms:0", "coefficient of variation '0' must be above 0"),
        ("normal:10ms:0ms", "duration '0ms' must be above 0"),
        ("mixture:constant:10ms", "is not weight*distribution"),
        ("mixture:0.5*constant:10ms", "the weights sum to 0.5; make them sum to 1"),
        ("mixture:x*constant:10ms", "weight 'x' is not a plain number"),
        ("mixture:0.5*constant:10ms+0.5*constant:1", "duration '1' is not a number with a unit"),
    ],
)
def test_errors_say_what_value_and_remedy(text, said):
    with pytest.raises(ValueError, match="distribution") as caught:
        parse_distribution(text)
    assert said in str(caught.value)
