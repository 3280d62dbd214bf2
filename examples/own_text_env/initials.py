"""Your own text environment: `hca=` is to be answered by its first letter. `polyrhythm train initials.yaml`, here."""

from __future__ import annotations

from random import Random
from typing import ClassVar, NamedTuple

from polyrhythm.plugins.language.text import Reply, TextSettings, draw_apart


class Word(NamedTuple):
    prompt: str


class InitialsSettings(TextSettings):
    type: str = "initials:InitialsSettings"
    longest: int = 4
    alphabet: ClassVar = "abcdefgh="

    def conversation(self) -> Initials:
        return Initials(self.longest)


class Initials:
    def __init__(self, longest: int) -> None:
        self._longest = longest

    def begin(self, task: int, seed: int) -> str:
        self._prompt: str = draw_apart(seed, self._draw).prompt
        return self._prompt

    def _draw(self, random: Random) -> Word:
        return Word("".join(random.choices("abcdefgh", k=random.randint(1, self._longest))) + "=")

    def reply(self, message: str) -> Reply:
        return Reply(reward=float(message == self._prompt[0]), success=message == self._prompt[0])

    def expert(self) -> str:
        return self._prompt[0]
