"""Results in words, for people; `--json` has all of it, for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_RATE = {"rate", "low", "high", "successes", "episodes"}


def rate(result: Mapping[str, Any]) -> str:
    """A success rate with its interval: `73% [66, 79], 117 of 160 episodes`."""
    low, high = (f"{100 * result[key]:.0f}" for key in ("low", "high"))
    mean = f", mean return {result['mean_return']:.4g}" if "mean_return" in result else ""
    return f"{100 * result['rate']:.0f}% [{low}, {high}], {result['successes']} of {result['episodes']} episodes{mean}"


def lines(result: Mapping[str, Any]) -> str:
    """One `name: value` line for each entry; rates in words, other nested values as JSON. A rate itself comes first.

    Where no episode at all succeeded, the environment may well have no measure of success: then the return leads.
    """
    succeeded = any(value["successes"] for value in (result, *result.values()) if _is_rate(value))
    first = [_value(result, succeeded)] if _is_rate(result) else []
    said = _RATE | {"mean_return"} if first else set()
    return "\n".join(
        first + [f"{name}: {_value(value, succeeded)}" for name, value in result.items() if name not in said]
    )


def _is_rate(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) >= _RATE


def _value(value: Any, succeeded: bool) -> str:
    if _is_rate(value):
        if succeeded or "mean_return" not in value:
            return rate(value)
        return f"mean return {value['mean_return']:.4g}, {value['episodes']} episodes, none of which reported success"
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)
