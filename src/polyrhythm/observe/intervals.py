"""Computes Wilson confidence intervals of success rates, and formats results of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Interval(NamedTuple):
    """A success rate with its counts and 95% interval, as in `summary.json`."""

    successes: int
    episodes: int
    rate: float
    low: float
    high: float


def wilson(successes: int, episodes: int, z: float = 1.959963984540054) -> Interval:
    """Wilson's score interval of a binomial rate; z = 1.96 standard deviations cover 95%.

    It stays inside 0..1 and keeps a width at 0 and n successes, where the normal interval has none:
    29 of 160 gives 0.181 [0.129, 0.248]; 0 of 10 gives 0 [0, 0.278]. (Wilson 1927, JASA 22.)
    """
    if episodes < 1 or not 0 <= successes <= episodes:
        raise ValueError(f"{successes} successes of {episodes} episodes; give 1 or more episodes and 0 to that many")
    rate, square = successes / episodes, z * z
    centre = (rate + square / (2 * episodes)) / (1 + square / episodes)
    spread = math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes**2))
    half = z / (1 + square / episodes) * spread
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == episodes else centre + half
    return Interval(successes, episodes, rate, low, high)


def success_rate(successes: Sequence[bool | None]) -> dict[str, Any]:
    """`Interval` of these episodes, by name. None: the episode reported no success, so it did not succeed; but if none
    of them reported any, all entries but `episodes` are None."""
    found = wilson(sum(map(bool, successes)), len(successes))._asdict()
    if all(success is None for success in successes):
        return {name: value if name == "episodes" else None for name, value in found.items()}
    return found


def success_in_words(successes: int, episodes: int, of: str = "") -> str:
    """`success in 5 of 64 (8% [3, 17])`: count, rate and interval in per cent. of: words before the 64."""
    rate, low, high = wilson(successes, episodes)[2:]
    return f"success in {successes} of {of}{episodes} ({percent(rate)}% [{100 * low:.0f}, {100 * high:.0f}])"


def percent(share: float) -> str:
    """In per cent: `73`; `99.6` where `100` would say that all are, `0.4` where `0` would say that none is."""
    rounded = f"{100 * share:.0f}"
    return f"{100 * share:.1f}" if rounded in ("0", "100") and 0 < share < 1 else rounded


def return_in_words(returns: Sequence[float]) -> str:
    """`return 0.31`: the mean of the finite returns, with the number of the others if there are any."""
    finite = [earned for earned in returns if math.isfinite(earned)]
    if not finite:
        return "return not finite"
    others = len(returns) - len(finite)
    mean = f"return {sum(finite) / len(finite):.4g}"
    return f"{mean} (not finite in {others} of {len(returns)})" if others else mean


def counted(count: int, noun: str) -> str:
    """The count with its noun: `1 episode`, `2 episodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def is_told(count: int) -> bool:
    """Whether what happens often is told this time: the 1st, the 10th, the 100th, and so on."""
    return str(count).strip("0") == "1"


def times_so_far(count: int) -> str:
    """` (10 times so far)`; "" the first time."""
    return "" if count == 1 else f" ({count} times so far)"


def deciding(evaluated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tally that ranks an entry {version, way: tally, …} of evaluations.json: its first, greedy if measured."""
    tally: Mapping[str, Any] = next(value for name, value in evaluated.items() if name != "version")
    return tally
