"""GEM environments (gem-llm) as conversations: observations are the prompt and the replies."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.language.text.base import Count, TextSettings
from polyrhythm.plugins.language.text.conversation import Reply
from polyrhythm.specs.hashing import library_seed

#: GEM draws from the global generators, which all rows of a process share.
_GLOBAL = threading.Lock()


class GemSettings(TextSettings):
    """An environment of GEM by its id, such as game:GuessTheNumber-v0-easy. Rewards are its own.

    Episodes of evaluations have seeds of their own; where a game has few beginnings, they occur in training too.
    """

    needs: ClassVar = ("gem",)
    extra: ClassVar = "gem"

    type: Literal["gem"] = "gem"
    id: Annotated[str, Field(min_length=1)]
    """Its id; `gem.print_envs()` lists them."""
    options: Mapping[str, Any] = {}
    """Further arguments of gem.make, such as {max_turns: 8}."""
    success: float = 1.0
    """Least reward of the last message of an episode that succeeded."""
    max_turns: Count = 20
    """Most messages of an episode."""
    max_prompt_tokens: Count = 2048
    """Most tokens before a message: the prompt and everything said since."""

    def conversation(self) -> Gem:
        return Gem(self)


class Gem:
    """Conversation of one environment, with a random state of its own, so that rows do not affect each other."""

    def __init__(self, settings: GemSettings) -> None:
        self._success = settings.success
        self._state = _states()
        with _GLOBAL:
            self._env = _make(settings.id, settings.options)

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        observation, info = self._drawing("reset", library_seed(seed))
        return _shown(observation, info)

    def reply(self, message: str) -> Reply:
        observation, reward, terminated, truncated, info = self._drawing("step", message)
        done = bool(terminated or truncated)
        text = "" if done else f"\n{_shown(observation, info)}"
        return Reply(text, float(reward), done, done and float(reward) >= self._success)

    def _drawing(self, method: str, argument: object) -> Any:
        with _GLOBAL:
            others = _states()
            _set_states(self._state)
            try:
                return getattr(self._env, method)(argument)
            finally:
                self._state = _states()
                _set_states(others)


def _shown(observation: object, info: Mapping[str, Any]) -> str:
    """An observation with GEM's suffix and a line end."""
    parts = [str(observation), str(info.get("suffix", ""))]
    return "".join(f"{part.rstrip()}\n" for part in parts if part.strip())


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _make(name: str, options: Mapping[str, Any]) -> Any:
    """Create the environment. MissingError: gem-llm is not installed; ConfigError: unknown id or invalid options."""
    try:
        import gem
        from gem.envs.registration import ENV_REGISTRY
    except ImportError as error:
        install = install_command("gem")
        raise MissingError(f"env.type = gem: {error}; run in a Python of its own: {install}") from error
    if name not in ENV_REGISTRY:
        near = get_close_matches(name, ENV_REGISTRY, 3, 0.3) or sorted(ENV_REGISTRY)[:3]
        raise ConfigError(f"env.id = {name}: GEM has no such environment; use one such as {', '.join(near)}")
    try:
        return gem.make(name, **options)
    except Exception as error:
        raise ConfigError(
            f"env.id = {name}: making it raised {type(error).__name__} ({error}); correct env.options, or, if its data "
            "is to be downloaded, fetch it first"
        ) from error
