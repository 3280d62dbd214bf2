"""Settings of scorers: the reward function, and how many processes call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from polyrhythm.config.base import Count, InvalidSetting, Section


def _check_function(value: str) -> str:
    module, _, name = value.partition(":")
    if not (name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise InvalidSetting("", value, "write module:function, such as my_rewards:judge")
    return value


class ScoringSettings(Section):
    """A reward function of your own, called on finished samples in processes of its own (docs/scoring.md)."""

    function: Annotated[str, AfterValidator(_check_function)]
    """module:function of a sample, which returns a number or a Score; or module:Class, made once per process."""
    options: Mapping[str, Any] = {}
    """Further keyword arguments of the function, or of the class."""
    processes: Count = 1
    """Scorer processes."""
    at_a_time: Count = 1
    """Samples that each of them scores at a time, in threads; more than 1 for functions that wait for others."""
    max_attempts: Count = 3
    """Tries of a sample before it is dropped, with its group, and replaced."""
    try_first: bool = True
    """Call the function before the start, on an episode of a text environment."""
