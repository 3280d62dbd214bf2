"""Expected maximum of several sample times: L_gen of an unbounded distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence

from polyrhythm.specs.distributions import Distribution

#: Draws per sample of the maximum, and their minimum and maximum in total.
_PER_SAMPLE, _LEAST, _MOST = 32, 20_000, 1_000_000


def expected_longest(times: Distribution, samples: int, seed: int = 0) -> float:
    """E max of `samples` draws, seconds; the same for the same seed.

    An unbounded distribution has no L_gen; proposition 1 holds in expectation with this in its place: of the N samples
    of a version if synchronous, of the (⌊α⌋+1)·N concurrent ones if asynchronous. An estimate, accurate to some
    per cent for long tails; above 30,000 samples it is slightly low.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; make it at least 1")
    rng = random.Random(seed)
    draws = min(max(_PER_SAMPLE * samples, _LEAST), _MOST)
    return expected_maximum(sorted(times.sample(rng) for _ in range(draws)), samples)


def expected_maximum(ordered: Sequence[float], count: int) -> float:
    """E max of `count` values drawn with replacement from `ordered`, smallest first.

    Example: of [1, 3], two values: 3 unless both are 1, so 2.5.
    """
    total = len(ordered)
    below, expected = 0.0, 0.0
    for rank, value in enumerate(ordered, 1):
        upto = (rank / total) ** count
        expected += value * (upto - below)
        below = upto
    return expected
