"""Results in words, for people; `--json` has all of it, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def rate(result: Mapping[str, Any]) -> str:
    """A success rate with its interval: `73% [66, 79], 117 of 160 episodes`."""
    low, high = (f"{100 * result[key]:.0f}" for key in ("low", "high"))
    mean = f", mean return {result['mean_return']:.4g}" if "mean_return" in result else ""
    return f"{100 * result['rate']:.0f}% [{low}, {high}], {result['successes']} of {result['episodes']} episodes{mean}"


def lines(result: Mapping[str, Any]) -> str:
    """One `name: value` line for each entry; rates in words, other nested values as JSON."""
    return "\n".join(f"{name}: {_value(value)}" for name, value in result.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping) and {"rate", "low", "high", "successes", "episodes"} <= set(value):
        return rate(value)
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
