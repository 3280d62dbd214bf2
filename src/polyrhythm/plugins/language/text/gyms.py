"""Environments of GEM, and problems of reasoning-gym, which programs generate and score, without downloads."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.language.sandbox.tool import SandboxSettings
from polyrhythm.plugins.language.text.base import Count, TextSettings, draw_apart, enclosed
from polyrhythm.plugins.language.text.conversation import Conversation, Reply
from polyrhythm.plugins.language.text.with_python import INSTRUCTION, WithPython
from polyrhythm.specs import EnvSpec, Task
from polyrhythm.specs.hashing import library_seed

log = logging.getLogger(__name__)

#: GEM draws from the global generators, which all rows of a process share.
_GLOBAL = threading.Lock()
#: Problems of a data set of reasoning-gym: each is made of its number alone.
_PROBLEMS = 2**31
#: The least score of a right answer.
_RIGHT = 0.99


def _near(name: str, known: Iterable[str]) -> str:
    return ", ".join(get_close_matches(name, known, 3, 0.3) or sorted(known)[:3])


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
    def __init__(self, settings: GemSettings) -> None:
        """MissingError: gem-llm is not installed; ConfigError: unknown id or invalid options."""
        name = settings.id
        try:
            import gem
            from gem.envs.registration import ENV_REGISTRY
        except ImportError as error:
            install = install_command("gem")
            raise MissingError(f"env.type = gem: {error}; run in a Python of its own: {install}") from error
        if name not in ENV_REGISTRY:
            near = _near(name, ENV_REGISTRY)
            raise ConfigError(f"env.id = {name}: GEM has no such environment; use one such as {near}")
        self._success, self._state = settings.success, _states()
        try:
            with _GLOBAL:
                self._env = gem.make(name, **settings.options)
        except Exception as error:
            raise ConfigError(
                f"env.id = {name}: making it raised {type(error).__name__} ({error}); correct env.options, or, if its "
                "data is to be downloaded, fetch it first"
            ) from error

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        observation, info = self._drawing(self._env.reset, library_seed(seed))
        return shown_text(observation, info)

    def reply(self, message: str) -> Reply:
        observation, reward, terminated, truncated, info = self._drawing(self._env.step, message)
        done = bool(terminated or truncated)
        text = "" if done else f"\n{shown_text(observation, info)}"
        return Reply(text, float(reward), done, done and float(reward) >= self._success)

    def _drawing(self, call: Callable[[Any], Any], argument: object) -> Any:
        with _GLOBAL:
            others = _states()
            _set_states(self._state)
            try:
                return call(argument)
            finally:
                self._state = _states()
                _set_states(others)


def shown_text(observation: object, info: Mapping[str, Any]) -> str:
    """An observation with GEM's suffix and a line end."""
    parts = [str(observation), str(info.get("suffix", ""))]
    return "".join(f"{part.rstrip()}\n" for part in parts if part.strip())


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _set_states(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])


def _as_mapping(value: Any) -> Any:
    """Expand the short form: a name or a list of names, without settings."""
    names = [value] if isinstance(value, str) else value
    return {name: {} for name in names} if isinstance(names, list | tuple) else names


class ReasoningGymSettings(TextSettings):
    """Data sets of reasoning-gym, one task each: the prompt is the question, the reward the data set's score of the
    answer, 0 to 1. A problem is a function of the seed; those of evaluations do not occur in training."""

    traits: ClassVar = replace(TextSettings.traits, expert=True)
    needs: ClassVar = ("reasoning_gym",)
    extra: ClassVar = "reasoning-gym"

    type: Literal["reasoning_gym"] = "reasoning_gym"
    datasets: Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(_as_mapping), Field(min_length=1)] = {
        "chain_sum": {}
    }
    """Names of data sets, with settings of theirs, such as {chain_sum: {min_terms: 2, max_digits: 1}}."""
    answer_tag: str = "answer"
    """The answer stands between <answer> and </answer>, the last such pair; empty: the whole message is the answer."""
    instruction: str = "Give the answer between <answer> and </answer>.\n"
    """What stands before the question."""
    max_prompt_tokens: Count = 512
    """Most tokens before a message: the prompt and, with tool, everything said since."""
    tool: Literal["python"] | None = None
    """`python`: code between <python> and </python> is run in the sandbox and its output shown, in several turns."""
    sandbox: SandboxSettings = SandboxSettings()
    """Limits of a call of the tool."""

    @model_validator(mode="after")
    def _has_turns(self) -> ReasoningGymSettings:
        if bool(self.tool) != (self.max_turns > 1):
            raise ValueError(f"max_turns = {self.max_turns}: a call takes a turn; use 1 without tool, more with it")
        return self

    def spec(self) -> EnvSpec:
        for name, options in self.datasets.items():
            _dataset(name, json.dumps(options))
        return replace(super().spec(), tasks=tuple(Task(name, name) for name in self.datasets))

    def conversation(self) -> Conversation:
        return WithPython(Problem(self), self.sandbox) if self.tool else Problem(self)


class Problem:
    def __init__(self, settings: ReasoningGymSettings) -> None:
        self._settings = settings
        self._names = list(settings.datasets)
        self._task = 0
        self._entry: dict[str, Any] = {}
        self._told = False

    def begin(self, task: int, seed: int) -> str:
        self._task = task
        self._entry = draw_apart(seed, lambda random: self._dataset[random.randrange(_PROBLEMS)], self._prompt)
        return self._prompt(self._entry)

    def _prompt(self, entry: Mapping[str, Any]) -> str:
        tool = INSTRUCTION if self._settings.tool else ""
        return f"{self._settings.instruction}{tool}{entry['question']}\n"

    @property
    def _dataset(self) -> Any:
        name = self._names[self._task]
        return _dataset(name, json.dumps(self._settings.datasets[name]))

    def reply(self, message: str) -> Reply:
        """The data set's score; 0 if its scorer raises, since the answer is arbitrary text."""
        answer = extract(message, self._settings.answer_tag)
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:
            score = 0.0
            if not self._told:
                words = "%s cannot score %.80r, so it counts as wrong; like answers come without a warning"
                log.warning(words, self._names[self._task], answer, exc_info=True)
                self._told = True
        return Reply(reward=score, success=score >= _RIGHT)

    def expert(self) -> str:
        tag, answer = self._settings.answer_tag, str(self._entry["answer"])
        return f"<{tag}>{answer}</{tag}>" if tag else answer


def extract(message: str, tag: str) -> str | None:
    """The content of the tag in a message; None without a pair of tags."""
    if not tag:
        return message.strip()
    found = deque(enclosed(message, f"<{tag}>", f"</{tag}>"), maxlen=1)
    return found[0].strip() if found else None


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    """The data set, created once per process. MissingError: no reasoning-gym; ConfigError: wrong name or settings."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        install = install_command("reasoning-gym")
        raise MissingError(f"env.type = reasoning_gym: {error}; run: {install}") from error
    if name not in DATASETS:
        raise ConfigError(f"env.datasets = {name}: reasoning-gym has no such; use one such as {_near(name, DATASETS)}")
    try:
        return reasoning_gym.create_dataset(name, seed=0, size=_PROBLEMS, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"env.datasets.{name} = {options}: {error}; correct it") from error
