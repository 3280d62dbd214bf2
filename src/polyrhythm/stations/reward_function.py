"""The reward function of a run, as its settings name it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from polyrhythm.conformance import raised
from polyrhythm.errors import ConfigError
from polyrhythm.specs import SampleView, Score

#: Characters quoted of what a function returned.
_QUOTED = 80


class WrongScore(Exception):
    """The function returned what is no score."""


class RewardFunction:
    """A function of a `SampleView`, called by `__call__`. label: the setting that names it."""

    def __init__(self, label: str, function: Callable[[SampleView], object]) -> None:
        self.label, self._function = label, function

    def __call__(self, sample: SampleView) -> object:
        found = self._function(sample)
        return asyncio.run(found) if inspect.iscoroutine(found) else found


def load_reward(path: str, options: Mapping[str, Any]) -> RewardFunction:
    """The function that `module:function` names, called with `options` as further keyword arguments; of a class, an
    object that was made with them. ConfigError: there is none, or it does not take them."""
    label = f"scoring.function = {path}"
    module, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ConfigError(f"{label}: {module} has no {name}; name a function of it") from error
    except ImportError as error:
        raise ConfigError(f"{label}: it cannot be imported ({error}); install it or correct the name") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise ConfigError(f"{label}: importing {module} {raised(error)}; fix it there") from error
    if inspect.isclass(found):
        try:
            made = found(**options)
        except Exception as error:
            raise ConfigError(
                f"{label}: making it with scoring.options {raised(error)}; correct one of them"
            ) from error
        if not callable(made):
            raise ConfigError(f"{label}: its objects cannot be called; give the class __call__(self, sample)")
        return RewardFunction(label, made)
    if not callable(found):
        raise ConfigError(f"{label}: it is {type(found).__name__}, not a function; name a function of {module}")
    try:
        inspect.signature(found).bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{label}: it cannot be called with a sample and scoring.options ({error}); correct one of them"
        ) from error
    except ValueError:
        pass  # it has no signature, such as a builtin
    return RewardFunction(label, lambda sample: found(sample, **options))


def as_score(value: object) -> Score:
    """The score that the function returned. WrongScore: it is none, or not finite."""
    number, success = (value.reward, value.success) if isinstance(value, Score) else (value, None)
    try:
        reward = math.nan if isinstance(number, str) else float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise WrongScore(f"it returned {repr(value)[:_QUOTED]}; return a finite number, or a Score")
    return Score(reward, None if success is None else bool(success))
