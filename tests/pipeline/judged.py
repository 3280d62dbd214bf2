"""Text environments and reward functions that misbehave on purpose, and one that notes what it is given."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar, Literal

from polyrhythm.plugins.language.text import Reply, TextSettings
from polyrhythm.specs import SampleView


class SpeltSettings(TextSettings):
    """Without an expert. defect: of its reply; after: replies that are right before it."""

    type: Literal["tests.pipeline.judged:SpeltSettings"] = "tests.pipeline.judged:SpeltSettings"
    defect: str = ""
    after: int = 0
    max_new_tokens: int = 4
    max_prompt_tokens: int = 8

    alphabet: ClassVar = "abc"

    def conversation(self) -> Spelt:
        return Spelt(self)


class UnevenSettings(SpeltSettings):
    """One prompt in four is too long, one has a character without an id; so have messages of the expert."""

    type: Literal["tests.pipeline.judged:UnevenSettings"] = "tests.pipeline.judged:UnevenSettings"  # type: ignore[assignment]

    def conversation(self) -> Spelt:
        return Uneven(self)


class HangingExpertSettings(SpeltSettings):
    """With an expert that never answers."""

    type: Literal["tests.pipeline.judged:HangingExpertSettings"] = "tests.pipeline.judged:HangingExpertSettings"  # type: ignore[assignment]

    def conversation(self) -> Spelt:
        return HangingExpert(self)


class Spelt:
    #: Conversations that were closed.
    closed = 0

    def __init__(self, settings: SpeltSettings) -> None:
        self._defect, self._after = settings.defect, settings.after

    def begin(self, task: int, seed: int) -> str:
        return "a" * 32 if self._defect == "long" else "abc"

    def reply(self, message: str) -> Reply:
        self._after -= 1
        if self._defect == "raises" and self._after < 0:
            raise KeyError("no such word")
        if self._defect == "hangs" and self._after < 0:
            time.sleep(1000)
        if self._defect == "nan":
            return Reply(reward=float("nan"))
        if self._defect == "no reply":
            return 1.0  # type: ignore[return-value]
        return Reply(reward=float(message == "abc"), done=self._defect != "long")

    def close(self) -> None:
        if self._defect == "close raises":
            Spelt.closed += 1
            raise OSError("stays open")


class Uneven(Spelt):
    def begin(self, task: int, seed: int) -> str:
        self._seed = seed % 2**62  # the same for evaluations
        return ("abc", "a" * 32, "abc", "?")[self._seed // 4 % 4]

    def expert(self) -> str:
        return ("abc", "a" * 32, "abc", "?")[self._seed % 4]


class HangingExpert(Spelt):
    def expert(self) -> str:
        time.sleep(1000)
        return "abc"


def noted(sample: SampleView, *, file: str) -> float:
    """Writes what it is given."""
    seen = (sample.task, sample.prompt, sample.messages, sample.terminated, sample.trajectory.rewards.shape)
    Path(file).write_text(f"{seen}\n")
    return 0.0


def stuck(sample: SampleView) -> float:
    raise ValueError(f"no opinion on {sample.reply!r}")


def none(sample: SampleView) -> None:
    """Forgets to return."""


def hangs(sample: SampleView) -> float:
    time.sleep(1000)
    return 0.0
