"""Loads and calls the run's reward function."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import definition_place, import_function, raised
from polyrhythm.envs.base import FullEnvSettings, traits_of
from polyrhythm.errors import ConfigError
from polyrhythm.specs import EnvSpec, SampleView, Score, Trajectory, Transcript
from polyrhythm.specs.finite import as_number

#: Characters quoted of what a function returned.
_QUOTED = 80

_NO_TEXT = Transcript("", (), "")


class WrongScore(Exception):
    """The function returned no valid score."""


class RewardFunction:
    """A callable on a `SampleView`. label: the setting that names it; place: ` (file, line 12)`, if known."""

    def __init__(self, label: str, function: Callable[[SampleView], object], place: str = "") -> None:
        self.label, self._function, self.place = label, function, place

    def __call__(self, sample: SampleView) -> object:
        found = self._function(sample)
        return asyncio.run(found) if inspect.iscoroutine(found) else found


def load_reward(path: str, options: Mapping[str, Any]) -> RewardFunction:
    """The function or class `module:function`; `options` are keyword arguments, of a class for its constructor.
    ConfigError: it does not exist, or does not accept them."""
    label = f"scoring.function = {path}"
    found: Any = import_function(label, path)
    if inspect.isclass(found):
        try:
            made = found(**options)
        except Exception as error:
            raise ConfigError(
                f"{label}: making it with scoring.options {raised(error)}; correct one of them"
            ) from error
        if not callable(made):
            raise ConfigError(f"{label}: its objects cannot be called; give the class __call__(self, sample)")
        return RewardFunction(label, made, definition_place(made))
    try:
        inspect.signature(found).bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"{label}: it cannot be called with a sample and scoring.options ({error}); correct one of them"
        ) from error
    except ValueError:
        pass  # it has no signature, such as a builtin
    return RewardFunction(label, lambda sample: found(sample, **options), definition_place(found))


def as_score(value: object) -> Score:
    """The returned value as a score. WrongScore: it is not a score, or not finite."""
    number, success = (value.reward, value.success) if isinstance(value, Score) else (value, None)
    reward = as_number(number)
    if not math.isfinite(reward):
        raise WrongScore(f"it returned {repr(value)[:_QUOTED]}; return a finite number, or a Score")
    return Score(reward, None if success is None else bool(success))


def view_of(env: object, spec: EnvSpec, trajectory: Trajectory, *, seed: int, evaluation: bool) -> SampleView:
    """The view of a sample for a reward function. env: its environment's settings; seed: of its ticket."""
    trajectory = _read_only(trajectory)
    traits, full = traits_of(env), cast(FullEnvSettings, env)
    prompt, messages, text = full.transcribe(trajectory) if traits.transcribes else _NO_TEXT
    return SampleView(
        task=spec.tasks[trajectory.task].name,
        seed=seed,
        evaluation=evaluation,
        prompt=prompt,
        messages=messages,
        text=text,
        terminated=trajectory.terminated,
        success=trajectory.success,
        episode_return=trajectory.episode_return,
        trajectory=trajectory,
        reference=full.reference(seed) if traits.references else None,
    )


def _read_only(trajectory: Trajectory) -> Trajectory:
    content: dict[str, Any] = {}
    for field in fields(trajectory):
        value = getattr(trajectory, field.name)
        if isinstance(value, np.ndarray):
            content[field.name] = _locked(value)
        elif isinstance(value, dict):
            content[field.name] = {name: _locked(array) for name, array in value.items()}
    return replace(trajectory, **content)


def _locked(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view
