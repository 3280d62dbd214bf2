"""Cost models: the working time of a simulated station, and the length of an episode.

A cost is a distribution of durations plus a time per unit of work (a row, a transition):

| text | meaning for n units |
|---|---|
| `10ms` | 10 ms |
| `10ms+0.1ms` | 10 ms + n · 0.1 ms |
| `lognormal:10ms:0.8+0.1ms` | a draw of mean 10 ms, plus n · 0.1 ms |

A count is a whole number, or a distribution whose unit is `steps`: `lognormal:40steps:0.4`, rounded, at least 1.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from polyrhythm.specs.distributions import Constant, Distribution, parse_distribution, parse_duration

_AFFINE = re.compile(r"(.*[^+\s])\s*\+\s*([\d.]+\s*[a-z]+)")


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost of `base` seconds (a distribution) plus `per_unit` seconds for each unit of work."""

    base: Distribution
    per_unit: float = 0.0

    def draw(self, rng: random.Random, units: int = 1) -> float:
        return self.base.sample(rng) + self.per_unit * units

    def mean(self, units: int = 1) -> float:
        return self.base.mean + self.per_unit * units


@dataclass(frozen=True, slots=True)
class ScaledCost(Cost):
    """A cost that is multiplied by `factor()`, which changes during a simulation."""

    factor: Callable[[], float] = field(kw_only=True)

    def draw(self, rng: random.Random, units: int = 1) -> float:
        return self.factor() * Cost.draw(self, rng, units)


FREE = Cost(Constant(0.0))


@dataclass(frozen=True, slots=True)
class Count:
    """A random whole number of at least 1. distribution: in steps, represented as seconds."""

    distribution: Distribution

    def draw(self, rng: random.Random) -> int:
        return max(1, round(self.distribution.sample(rng)))


def parse_cost(value: object) -> Cost:
    """Parse a cost. ValueError: it is malformed."""
    if isinstance(value, Cost):
        return value
    if not isinstance(value, str):
        raise ValueError(f"cost {value!r} is not text; write a duration with a unit, such as 10ms or 10ms+0.1ms")
    found = _AFFINE.fullmatch(value.strip())
    if found is None:
        return Cost(_distribution(value))
    return Cost(_distribution(found[1]), parse_duration(found[2]))


def parse_count(value: object) -> Count:
    """Parse a count: 40, or lognormal:40steps:0.4."""
    if isinstance(value, Count):
        return value
    if isinstance(value, int) and value >= 1:
        return Count(Constant(float(value)))
    if not isinstance(value, str) or "steps" not in value:
        raise ValueError(f"count {value!r} is not a whole number of at least 1; write 40 or lognormal:40steps:0.4")
    return Count(parse_distribution(value.replace("steps", "s")))


def _distribution(text: str) -> Distribution:
    """Parse a distribution; a bare duration is constant."""
    if ":" in text:
        return parse_distribution(text)
    return Constant(parse_duration(text))
