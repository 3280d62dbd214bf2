"""Problems of reasoning-gym: made by programs, each answer checked by its data set. Nothing is downloaded."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from polyrhythm.errors import ConfigError, MissingError, install_command
from polyrhythm.plugins.language.sandbox.tool import SandboxSettings
from polyrhythm.plugins.language.text.base import Count, TextSettings, draw_apart, enclosed
from polyrhythm.plugins.language.text.conversation import Conversation, Reply
from polyrhythm.plugins.language.text.with_python import INSTRUCTION, WithPython
from polyrhythm.specs import EnvSpec, Task

log = logging.getLogger(__name__)

#: Problems of a data set: each is made of its number alone.
_PROBLEMS = 2**31
#: The least score of a right answer.
_RIGHT = 0.99


def _as_mapping(value: Any) -> Any:
    """A name, or a list of names, without settings."""
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


class _Drawn(NamedTuple):
    prompt: str
    entry: dict[str, Any]


class Problem:
    """One question and its answer."""

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self._settings = settings
        self._names = list(settings.datasets)
        self._task = 0
        self._entry: dict[str, Any] = {}
        self._told = False

    def begin(self, task: int, seed: int) -> str:
        self._task = task
        found: _Drawn = draw_apart(seed, self._draw)
        self._entry = found.entry
        return found.prompt

    def _draw(self, random: Random) -> _Drawn:
        entry = self._dataset[random.randrange(_PROBLEMS)]
        instruction = self._settings.instruction + (INSTRUCTION if self._settings.tool else "")
        return _Drawn(f"{instruction}{entry['question']}\n", entry)

    @property
    def _dataset(self) -> Any:
        name = self._names[self._task]
        return _dataset(name, json.dumps(self._settings.datasets[name]))

    def reply(self, message: str) -> Reply:
        score = self._score(extract(message, self._settings.answer_tag))
        return Reply(reward=score, success=score >= _RIGHT)

    def _score(self, answer: str | None) -> float:
        """The data set's score; 0 where its scorer raises at the answer, which may be anything."""
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except Exception:
            if not self._told:
                words = "%s cannot score %.80r, so it counts as wrong; like answers come without a warning"
                log.warning(words, self._names[self._task], answer, exc_info=True)
                self._told = True
            return 0.0

    def expert(self) -> str:
        """The data set's own answer."""
        tag, answer = self._settings.answer_tag, str(self._entry["answer"])
        return f"<{tag}>{answer}</{tag}>" if tag else answer


def extract(message: str, tag: str) -> str | None:
    """The answer in a message; None where no pair of tags is in it."""
    if not tag:
        return message.strip()
    found = deque(enclosed(message, f"<{tag}>", f"</{tag}>"), maxlen=1)
    return found[0].strip() if found else None


@lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    """The data set, made once per process. MissingError: the package is not installed; ConfigError: there is no such
    data set, or not with these settings."""
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


def _near(name: str, known: Mapping[str, object]) -> str:
    from difflib import get_close_matches

    return ", ".join(get_close_matches(name, known, 3, 0.3) or sorted(known)[:3])
