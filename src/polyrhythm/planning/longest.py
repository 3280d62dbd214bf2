"""How long the longest of several samples takes, where no limit is known: L_gen of a law without an end."""

from __future__ import annotations

import random
from collections.abc import Sequence

from polyrhythm.specs.distributions import Distribution

#: Draws for each sample of the maximum, and the least and the most in all.
_PER_SAMPLE, _LEAST, _MOST = 32, 20_000, 1_000_000


def expected_longest(law: Distribution, samples: int, seed: int = 0) -> float:
    """E max of `samples` draws of the law, seconds; the same for the same seed.

    A law without an end has no L_gen; proposition 1 holds in expectation with this in its place: of the N samples of
    a version for a synchronous one, of the (⌊α⌋+1)·N that are made at once for an asynchronous one. An estimate, to
    some per cent where the tail is long; above 30,000 samples it is a little low.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; make it at least 1")
    rng = random.Random(seed)
    draws = min(max(_PER_SAMPLE * samples, _LEAST), _MOST)
    return expected_maximum(sorted(law.sample(rng) for _ in range(draws)), samples)


def expected_maximum(ordered: Sequence[float], count: int) -> float:
    """E max of `count` values drawn with replacement from those in `ordered`, smallest first.

    Example: of [1, 3], two values: 3 unless both are 1, so 2.5.
    """
    total = len(ordered)
    below, expected = 0.0, 0.0
    for rank, value in enumerate(ordered, 1):
        upto = (rank / total) ** count
        expected += value * (upto - below)
        below = upto
    return expected
