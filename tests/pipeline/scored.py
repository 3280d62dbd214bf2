"""Chains whose answers the environment does not judge, and a reward function that does."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from polyrhythm.plugins.language.text.chains import Chain, ChainsSettings
from polyrhythm.plugins.language.text.conversation import Conversation, Reply
from polyrhythm.specs import SampleView, Score


class UnjudgedSettings(ChainsSettings):
    type: Literal["tests.pipeline.scored:UnjudgedSettings"] = "tests.pipeline.scored:UnjudgedSettings"  # type: ignore[assignment]

    def conversation(self) -> Conversation:
        return Unjudged(self)


class Unjudged(Chain):
    def reply(self, message: str) -> Reply:
        return replace(super().reply(message), reward=0.0, success=False)


def verify(sample: SampleView) -> Score:
    """Whether the result is right, as `chains` says it; a message that was cut is none."""
    right = sample.terminated and "#" in sample.reply
    right = right and sample.reply.rpartition("#")[2] == str(eval(sample.prompt.rstrip("=")))
    return Score(float(right), success=right)
