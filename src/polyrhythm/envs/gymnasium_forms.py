"""A Gymnasium wrapper that checks the form of what an environment's reset and step return."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from polyrhythm.envs.gymnasium_spaces import Observations
from polyrhythm.errors import ConfigError

#: Most characters quoted of a returned value.
_QUOTED = 80


class CheckedForms(gymnasium.Wrapper[Any, Any, Any, Any]):  # type: ignore[misc]
    """Wrapper that raises ConfigError for results that violate Gymnasium's interface.

    where: setting that begins the error. A reward is one number, a flag one bool or 0 or 1; each may be a numpy scalar,
    or an array of shape () or (1,). observations: compare them with the observation space, except those of `drop`, and
    convert them to its dtypes.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], where: str, *, observations: bool = False, drop: Sequence[str] = ()
    ) -> None:
        super().__init__(env)
        self._where = where
        self._observations = Observations(env.observation_space, where, drop=drop) if observations else None
        try:
            inspect.signature(env.reset).bind(seed=0, options=None)
        except TypeError:
            raise ConfigError(
                f"{where}: its reset does not take seed and options, as in the old gym; define reset(self, *, "
                "seed=None, options=None) and seed its random numbers there"
            ) from None
        except ValueError:
            pass  # compiled code has no signature

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        found = self.env.reset(seed=seed, options=options)
        if not (isinstance(found, tuple | list) and len(found) == 2 and _is_info(found[1])):
            raise self._unlike("reset", found, "(observation, info)")
        observation, info = found
        if self._observations is not None:
            observation = self._observations.declared(observation)
        return observation, info or {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        found = self.env.step(action)
        if not (isinstance(found, tuple | list) and len(found) == 5 and _is_info(found[4])):
            raise self._unlike("step", found, "(observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, info = found
        if type(reward) is not float:
            reward = self._one("reward", reward, "biuf")
        if type(terminated) is not bool:
            terminated = self._flag("terminated", terminated)
        if type(truncated) is not bool:
            truncated = self._flag("truncated", truncated)
        if self._observations is not None:
            observation = self._observations.declared(observation)
        return observation, reward, terminated, truncated, info or {}

    def _one(self, name: str, value: Any, kinds: str) -> Any:
        if isinstance(value, np.floating):
            return float(value)
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            array = np.asarray(None)
        if array.shape not in ((), (1,)) or array.dtype.kind not in kinds:
            what = "one number" if name == "reward" else "True or False"
            raise ConfigError(f"{self._where}: step returned {name} = {_quoted(value)}; return {what}")
        return array.item()

    def _flag(self, name: str, value: Any) -> bool:
        if isinstance(value, np.bool_):
            return bool(value)
        found = self._one(name, value, "biu")
        if found not in (0, 1):
            raise ConfigError(f"{self._where}: step returned {name} = {_quoted(value)}; return True or False")
        return bool(found)

    def _unlike(self, call: str, found: Any, form: str) -> ConfigError:
        what = f"{len(found)} values: " if isinstance(found, tuple | list) else ""
        what += _quoted(found)
        return ConfigError(f"{self._where}: {call} returned {what}; return {form}, not the form of the old gym")


def checked_inside(env: gymnasium.Env[Any, Any], where: str) -> gymnasium.Env[Any, Any]:
    """Insert `CheckedForms` below the wrappers of `gymnasium.make`, which would themselves fail on other forms."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper) and not isinstance(layer, gymnasium.wrappers.OrderEnforcing):
        layer = layer.env
    if not isinstance(layer, gymnasium.Wrapper):
        return CheckedForms(env, where)
    layer.env = CheckedForms(layer.env, where)
    return env


def _is_info(value: Any) -> bool:
    return type(value) is dict or value is None or isinstance(value, Mapping)


def _quoted(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"
