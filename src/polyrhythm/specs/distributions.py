"""Distributions of durations, written as strings such as `lognormal:10ms:0.8`.

The synthetic environment and the cluster simulation share them. Unless noted, the first parameter is the mean.

| text | distribution |
|---|---|
| `constant:10ms` | always 10 ms |
| `lognormal:10ms:0.8` | mean 10 ms, standard deviation 0.8 of the logarithm |
| `gamma:10ms:0.5` | mean 10 ms, coefficient of variation 0.5 |
| `normal:10ms:5ms` | location 10 ms, scale 5 ms, redrawn while below 0 (so the mean is slightly above 10 ms) |
| `mixture:0.9*lognormal:8ms:0.5+0.1*constant:30ms` | one of the parts by its weight; weights sum to 1 |

Durations have a unit: ns, us, ms, s, min.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(" + "|".join(_UNITS) + ")")
_PLAIN = re.compile(r"\d+\.?\d*|\.\d+")
_WEIGHT_TOLERANCE = 1e-6


class Distribution(Protocol):
    """A distribution of non-negative durations in seconds."""

    @property
    def mean(self) -> float:
        """Exact expected value, seconds."""

    def sample(self, rng: random.Random) -> float:
        """One draw, seconds; all randomness comes from `rng`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Always `mean` seconds; does not use the random generator."""

    mean: float

    def sample(self, rng: random.Random) -> float:  # noqa: ARG002 (the protocol's)
        return self.mean


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Mean in seconds and standard deviation `sigma` of the logarithm."""

    mean: float
    sigma: float

    def sample(self, rng: random.Random) -> float:
        return rng.lognormvariate(math.log(self.mean) - 0.5 * self.sigma**2, self.sigma)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Mean in seconds and coefficient of variation `cv` (standard deviation over mean); 1 is exponential."""

    mean: float
    cv: float

    def sample(self, rng: random.Random) -> float:
        variance_ratio = self.cv**2
        return rng.gammavariate(1.0 / variance_ratio, self.mean * variance_ratio)


@dataclass(frozen=True, slots=True)
class TruncatedNormal:
    """A normal of the given location and scale (seconds), restricted to values of at least 0."""

    location: float
    scale: float

    @property
    def mean(self) -> float:
        standard, cut = NormalDist(), -self.location / self.scale
        return self.location + self.scale * standard.pdf(cut) / standard.cdf(-cut)

    def sample(self, rng: random.Random) -> float:
        # The location is at least 0, so each try succeeds with probability 1/2 or more.
        while (value := rng.normalvariate(self.location, self.scale)) < 0.0:
            pass
        return value


@dataclass(frozen=True, slots=True)
class Mixture:
    """Part i with probability `weights[i]`."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    @property
    def mean(self) -> float:
        pairs = zip(self.weights, self.parts, strict=True)
        return math.fsum(weight * part.mean for weight, part in pairs)

    def sample(self, rng: random.Random) -> float:
        return rng.choices(self.parts, self.weights)[0].sample(rng)


def parse_distribution(text: str) -> Distribution:
    """Parse a distribution (see the table at the top of this module).

    Raises ValueError with the invalid part, its value and the expected form.

    >>> parse_distribution("mixture:0.9*constant:10ms+0.1*constant:30ms").mean
    0.012
    """
    name, _, rest = text.strip().partition(":")
    if name == "mixture":
        return _mixture(text, rest)
    return _simple(text, name, rest.split(":"))


def parse_duration(text: str) -> float:
    """Seconds of a duration with a unit: `parse_duration("10ms") == 0.01`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"duration {text!r} is not a number with a unit; write for example 10ms (units: {', '.join(_UNITS)})"
        )
    return float(found[1]) * _UNITS[found[2]]


def _constant(arguments: list[str]) -> Distribution:
    (mean,) = arguments
    return Constant(parse_duration(mean))


def _lognormal(arguments: list[str]) -> Distribution:
    mean, sigma = arguments
    return Lognormal(_positive_duration(mean), _number("sigma", sigma))


def _gamma(arguments: list[str]) -> Distribution:
    mean, cv = arguments
    return Gamma(_positive_duration(mean), _positive("coefficient of variation", cv))


def _normal(arguments: list[str]) -> Distribution:
    location, scale = arguments
    return TruncatedNormal(parse_duration(location), _positive_duration(scale))


_FORMS: dict[str, tuple[str, Callable[[list[str]], Distribution]]] = {
    "constant": ("constant:10ms", _constant),
    "lognormal": ("lognormal:10ms:0.8 (mean, sigma of the logarithm)", _lognormal),
    "gamma": ("gamma:10ms:0.5 (mean, coefficient of variation)", _gamma),
    "normal": ("normal:10ms:5ms (location, scale; truncated at 0)", _normal),
}
_MIXTURE_FORM = "mixture:0.9*lognormal:8ms:0.5+0.1*constant:30ms (weights sum to 1)"


def _simple(text: str, name: str, arguments: list[str]) -> Distribution:
    if name not in _FORMS:
        forms = "; ".join(form for form, _ in _FORMS.values())
        raise ValueError(f"distribution {text!r} has the unknown type {name!r}; write {forms}; or {_MIXTURE_FORM}")
    form, make = _FORMS[name]
    expected = form.split(" ")[0].count(":")
    if len(arguments) != expected:
        raise ValueError(f"distribution {text!r} has {len(arguments)} values instead of {expected}; write {form}")
    try:
        return make(arguments)
    except ValueError as error:
        raise ValueError(f"distribution {text!r}: {error}; the form is {form}") from None


def _mixture(text: str, rest: str) -> Distribution:
    weights: list[float] = []
    parts: list[Distribution] = []
    for term in rest.split("+"):
        weight, star, part = term.partition("*")
        if not star or part.strip().startswith("mixture"):
            raise ValueError(
                f"distribution {text!r}: the part {term!r} is not weight*distribution; write {_MIXTURE_FORM}"
            )
        try:
            weights.append(_positive("weight", weight))
        except ValueError as error:
            raise ValueError(f"distribution {text!r}: {error}; write {_MIXTURE_FORM}") from None
        parts.append(parse_distribution(part))
    if abs(math.fsum(weights) - 1.0) > _WEIGHT_TOLERANCE:
        raise ValueError(f"distribution {text!r}: the weights sum to {math.fsum(weights):g}; make them sum to 1")
    return Mixture(tuple(weights), tuple(parts))


def _number(what: str, text: str) -> float:
    if _PLAIN.fullmatch(text.strip()) is None:
        raise ValueError(f"{what} {text!r} is not a plain number of at least 0")
    return float(text)


def _positive(what: str, text: str) -> float:
    value = _number(what, text)
    if value <= 0.0:
        raise ValueError(f"{what} {text!r} must be above 0")
    return value


def _positive_duration(text: str) -> float:
    value = parse_duration(text)
    if value <= 0.0:
        raise ValueError(f"duration {text!r} must be above 0")
    return value
