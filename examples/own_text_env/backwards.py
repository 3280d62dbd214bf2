"""A text environment of your own: `abcd=` is to be answered by `dcba`. `polyrhythm train backwards.yaml`, here."""

from __future__ import annotations

from random import Random
from typing import ClassVar, NamedTuple

from polyrhythm.envs.text import Reply, TextSettings, draw_apart


class Word(NamedTuple):
    prompt: str


class BackwardsSettings(TextSettings):
    type: str = "backwards:BackwardsSettings"
    longest: int = 4
    """Most letters of a word."""
    alphabet: ClassVar = "abcdefgh="

    def conversation(self) -> Backwards:
        return Backwards(self.longest)


class Backwards:
    def __init__(self, longest: int) -> None:
        self._longest, self._word = longest, ""

    def begin(self, task: int, seed: int) -> str:
        def draw(random: Random) -> Word:
            return Word("".join(random.choices("abcdefgh", k=random.randint(2, self._longest))) + "=")

        self._word = draw_apart(seed, draw).prompt[:-1]
        return self._word + "="

    def reply(self, message: str) -> Reply:
        pairs = zip(message, self._word[::-1], strict=False)
        return Reply(reward=sum(a == b for a, b in pairs) / len(self._word), success=message == self._word[::-1])
