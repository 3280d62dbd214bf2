"""Differences of two policies that played the same episodes, with 95% intervals that use the pairing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, variance
from typing import Any

from polyrhythm.observe.intervals import student, wilson_bounds

#: Fields that identify an episode: it has the same initial state, task and noise in both evaluations.
_SAME = ("index", "sample", "seed", "task", "greedy")


@dataclass(frozen=True, slots=True)
class Pair:
    """An episode that both have played. state: its initial state, which several samples share; success: of a and of b,
    None if neither evaluation reported any; returns: of a and of b."""

    state: tuple[str, int]
    task: str
    success: tuple[bool, bool] | None
    returns: tuple[float, float]


def pair_up(a: Iterable[Mapping[str, Any]], b: Iterable[Mapping[str, Any]]) -> list[Pair]:
    """The episodes (`per_episode` of two evaluations) that ended in both, in order.

    An episode without a report of success is a failure, if another of the two evaluations has one.
    """
    first, second = ({tuple(one[name] for name in _SAME): one for one in own} for own in (a, b))
    reported = any(one["success"] is not None for own in (first, second) for one in own.values())
    return [
        Pair(
            (one["task"], one["seed"]),
            one["task"],
            (bool(one["success"]), bool(other["success"])) if reported else None,
            (one["return"], other["return"]),
        )
        for key, one in first.items()
        if (other := second.get(key)) is not None
    ]


def difference(pairs: Sequence[Pair]) -> dict[str, Any]:
    """b minus a over these pairs: {pairs, states, success, return}; success is None if none was reported.

    success: {a, b, difference, low, high, both, only_a, only_b, neither, p}: rates, and counts of pairs; the interval
    is `newcombe`'s, p is `mcnemar`'s, None if states have several samples. return: {a, b, difference, low, high}:
    means, and Student's interval of the mean difference of the states; low and high are None where it has none: there
    is one state, or all differ by the same.
    """
    states: dict[tuple[str, int], list[Pair]] = {}
    for pair in pairs:
        states.setdefault(pair.state, []).append(pair)
    earned = [fmean(pair.returns[1] - pair.returns[0] for pair in own) for own in states.values()]
    mean, low, high = student(earned)
    a, b = (fmean(pair.returns[side] for pair in pairs) for side in (0, 1))
    rounding = 1e-9 * max(abs(earned) for pair in pairs for earned in pair.returns)
    bounds = (low, high) if high - low > rounding else (None, None)
    found = {"a": a, "b": b, "difference": mean, "low": bounds[0], "high": bounds[1]}
    return {"pairs": len(pairs), "states": len(states), "success": _success(list(states.values())), "return": found}


def _success(states: Sequence[Sequence[Pair]]) -> dict[str, Any] | None:
    outcomes = [[pair.success for pair in own if pair.success is not None] for own in states]
    pairs = [pair for own in outcomes for pair in own]
    if not pairs:
        return None
    counts = {
        name: sum(pair == which for pair in pairs)
        for name, which in (
            ("both", (True, True)),
            ("only_a", (True, False)),
            ("only_b", (False, True)),
            ("neither", (False, False)),
        )
    }
    independent = len(states) == len(pairs)
    weight = 1.0 if independent else _effective(outcomes) / len(pairs)
    low, high = newcombe(*(weight * count for count in counts.values()))
    a, b = (fmean(pair[side] for pair in pairs) for side in (0, 1))
    p = mcnemar(counts["only_a"], counts["only_b"]) if independent else None
    return {"a": a, "b": b, "difference": b - a, "low": low, "high": high, **counts, "p": p}


def _effective(states: Sequence[Sequence[tuple[bool, bool]]]) -> float:
    """Number of independent pairs whose mean difference would vary as much as that of these states does.

    The samples of one state are not independent. At least the states, at most the pairs.
    """
    differences = [[int(b) - int(a) for a, b in own] for own in states]
    flat = [one for own in differences for one in own]
    between = variance(map(fmean, differences)) / len(states) if len(states) > 1 else 0.0
    alone = fmean(one * one for one in flat) - fmean(flat) ** 2
    if not (between and alone):
        return len(states)
    return max(len(states), min(alone / between, len(flat)))


def newcombe(both: float, only_a: float, only_b: float, neither: float) -> tuple[float, float]:
    """Newcombe's 95% interval of the difference of two paired rates, b minus a; counts of pairs by outcome.

    From the distances of both rates to the bounds of their Wilson intervals, with the correlation of the pairs:
    low = d - sqrt(x² - 2 φ x y + y²), x = b - low of b, y = high of a - a; high likewise with the other bounds;
    φ = (both · neither - only_a · only_b) / sqrt(product of the four margins), its numerator reduced by half of the
    pairs, to no less than 0, where it is positive. Where a margin is 0, φ is 0. It keeps a width where the outcomes are
    all equal. 1, 1, 7, 12 give b - a = 0.286 [0.026, 0.507].
    (Method 10 of Newcombe 1998, Statistics in Medicine 17, pages 2635 to 2650.)
    """
    pairs = both + only_a + only_b + neither
    a, b = (both + only_a) / pairs, (both + only_b) / pairs
    (low_a, high_a), (low_b, high_b) = wilson_bounds(a, pairs), wilson_bounds(b, pairs)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    together = both * neither - only_a * only_b
    if together > 0:
        together = max(together - pairs / 2, 0)
    phi = together / math.sqrt(margins) if margins else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return b - a - distance(b - low_b, high_a - a), b - a + distance(high_b - b, a - low_a)


def mcnemar(only_a: int, only_b: int) -> float:
    """McNemar's exact two-sided p: of so uneven a division of the pairs whose outcomes differ, if neither is better.

    2, 9 give 0.065. (McNemar 1947, Psychometrika 12; the binomial test.)
    """
    differing = only_a + only_b
    tail = sum(math.comb(differing, count) for count in range(min(only_a, only_b) + 1))
    return min(1.0, float(Fraction(2 * tail, 1 << differing)))
