"""Confidence intervals of success rates, mean@n and pass@k, and formatted results of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, variance
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
    rate = successes / episodes
    return Interval(successes, episodes, rate, *wilson_bounds(rate, episodes, z))


def wilson_bounds(rate: float, episodes: float, z: float = 1.959963984540054) -> tuple[float, float]:
    """Bounds of Wilson's interval; episodes may be a fraction, such as an effective number."""
    square = z * z
    centre = (rate + square / (2 * episodes)) / (1 + square / episodes)
    spread = math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes**2))
    half = z / (1 + square / episodes) * spread
    return (0.0 if rate == 0 else centre - half), (1.0 if rate == 1 else centre + half)


#: Two-sided 95% quantiles of Student's t with 1 to 4 degrees of freedom; the expansion below is within 0.2% from 5 on.
_T = (12.706205, 4.302653, 3.182446, 2.776445)


def student(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of independent values, and Student's 95% interval of it. One value has no interval: low and high equal it.

    0.70, 0.80, 0.90 give 0.80 [0.55, 1.05]. The quantile: Fisher and Cornish 1960, Technometrics 2.
    """
    mean, degrees = fmean(values), len(values) - 1
    if not degrees:
        return mean, mean, mean
    z = 1.959963984540054
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    quantile = _T[degrees - 1] if degrees <= len(_T) else sum(x / degrees**power for power, x in enumerate(terms))
    half = quantile * math.sqrt(variance(values) / len(values))
    return mean, mean - half, mean + half


def pass_at(k: int, samples: int, successes: int) -> float:
    """Probability that one of k samples, drawn from these without replacement, is a success: 1 - C(n-c,k) / C(n,k).

    The unbiased estimate of pass@k (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1 - math.comb(samples - successes, k) / math.comb(samples, k)


def of_samples(successes: Sequence[Sequence[bool]]) -> dict[str, dict[str, float]]:
    """mean@n, and pass@k for k = 1, 2, 4, … up to n, each with rate, low, high and starts.

    successes: of each state's samples; n: largest number of samples of a state; starts: number of initial states. A
    state with fewer than k samples, because some were dropped, is left out of pass@k.
    """
    counts = [(len(own), sum(own)) for own in successes]
    most = max(n for n, _ in counts)
    shares = {f"mean@{most}": [c / n for n, c in counts]}
    for power in range(most.bit_length()):
        k = 2**power
        shares[f"pass@{k}"] = [pass_at(k, n, c) for n, c in counts if n >= k]
    return {name: mean_share(own, sum(n for n, _ in counts)) for name, own in shares.items()}


def mean_share(shares: Sequence[float], episodes: int) -> dict[str, float]:
    """Mean share of independent states, with Wilson's 95% interval for the effective number of episodes.

    That number is rate · (1 - rate) / (variance of the mean), at least the states and at most the episodes.
    """
    rate, effective = fmean(shares), float(len(shares))
    if 0 < rate < 1 and len(shares) > 1:
        spread = variance(shares) / len(shares)
        effective = max(effective, min(rate * (1 - rate) / spread, episodes) if spread else episodes)
    low, high = wilson_bounds(rate, effective)
    return {"rate": rate, "low": low, "high": high, "starts": len(shares)}


def at_in_words(found: Mapping[str, Any]) -> str:
    """`, pass@4 62% [58, 66]` for each entry of `at` except pass@1, which equals the mean."""
    own = {name: value for name, value in found.get("at", {}).items() if name != "pass@1"}
    return "".join(f", {name} {rate_in_words(one)}" for name, one in own.items())


def rate_in_words(found: Mapping[str, Any]) -> str:
    """`73% [66, 79]`: rate and interval in per cent."""
    return f"{percent(found['rate'])}% [{100 * found['low']:.0f}, {100 * found['high']:.0f}]"


def success_rate(successes: Sequence[bool | None]) -> dict[str, Any]:
    """`Interval` of these episodes, by name.

    None counts as a failure; but if all are None, all entries except `episodes` are None.
    """
    found = wilson(sum(map(bool, successes)), len(successes))._asdict()
    if all(success is None for success in successes):
        return {name: value if name == "episodes" else None for name, value in found.items()}
    return found


def success_in_words(found: Mapping[str, Any], of: str = "") -> str:
    """`success in 5 of 64 (8% [3, 17])`: count, rate and interval in per cent. of: words before the 64."""
    return f"success in {found['successes']} of {of}{found['episodes']} ({rate_in_words(found)})"


def percent(share: float) -> str:
    """Per cent: `73`; with a decimal where rounding would give a false `100` or `0`."""
    rounded = f"{100 * share:.0f}"
    return f"{100 * share:.1f}" if rounded in ("0", "100") and 0 < share < 1 else rounded


def return_in_words(returns: Sequence[float]) -> str:
    """`return 0.31`: mean of the finite returns, with the number of the others."""
    finite = [earned for earned in returns if math.isfinite(earned)]
    if not finite:
        return "return not finite"
    others = len(returns) - len(finite)
    mean = f"return {sum(finite) / len(finite):.4g}"
    return f"{mean} (not finite in {others} of {len(returns)})" if others else mean


def episodes_in_words(recent: Sequence[tuple[bool | None, float]]) -> str:
    """Mean return of the last episodes, and their success rate with its 95% interval if one has reported it."""
    count, found = len(recent), success_rate([success for success, _ in recent])
    earned = return_in_words([reward for _, reward in recent])
    if found["rate"] is None:
        return f"{earned} over the last {count} episodes" if count > 1 else f"{earned} in the last episode"
    return f"{success_in_words(found, 'the last ')}, {earned}"


def is_told(count: int) -> bool:
    """Whether the count is 1, 10, 100, …: the occurrences of a frequent event that are logged."""
    return str(count).strip("0") == "1"


def times_so_far(count: int) -> str:
    """` (10 times so far)`; "" the first time."""
    return "" if count == 1 else f" ({count} times so far)"


def deciding(evaluated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tally that ranks an entry {version, mode: tally, …} of evaluations.json: its first, greedy if measured."""
    tally: Mapping[str, Any] = next(value for name, value in evaluated.items() if name != "version")
    return tally
