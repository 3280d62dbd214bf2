"""Chains of additions and subtractions, answered in one message, with a calculator, or with Python.

Demonstrations are imperfect on purpose: the teacher computes all steps in one of five episodes and answers early
otherwise. Imitation then learns a correct strategy that it rarely uses, which reinforcement learning can reinforce.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate
from random import Random
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from polyrhythm.plugins.language.sandbox.tool import SandboxSettings, ToolOutcome
from polyrhythm.plugins.language.text.base import Count, TextSettings, draw_apart
from polyrhythm.plugins.language.text.conversation import Conversation, Reply
from polyrhythm.plugins.language.text.with_python import WithPython

#: One demonstration in so many goes all the way.
_WHOLE = 5
#: Probability with which the teacher of the others gives up after a step or call.
_GIVES_UP = 0.7
_CALL = re.compile(r"<(\d{1,4})([+-])(\d{1,4})>")
#: What is shown of a call of Python: a number.
_NUMBER = re.compile(r"-?\d{1,9}")
#: Largest term of a chain.
_LARGEST = 9


class ChainsSettings(TextSettings):
    """Chains such as `4+1-3=`, whose result the model has to give after `#`: `#2`. Reward 1 if it is right.

    Without tool the running total stays in 0..9, and steps may be written before: `+1=5,-3=2#2`. With tool it grows,
    and a message `<4+1>` asks the calculator, which replies `5;`, or Python, which replies what any expression gives.
    """

    type: Literal["chains"] = "chains"
    terms: tuple[Count, Count] = (2, 16)
    """Fewest and most terms of a chain."""
    tool: bool | Literal["python"] = False
    """Whether the model may call a tool, in several turns: the calculator, or `python`, run in the sandbox."""
    sandbox: SandboxSettings = SandboxSettings()
    """Limits of a call of `tool: python`."""
    max_new_tokens: Annotated[int, Field(ge=4)] = 128
    """Most tokens of a message; longer ones are cut, which ends the episode."""
    max_prompt_tokens: Count = 36
    """Most tokens before a message: the prompt and, with tool, everything said since."""

    traits: ClassVar = replace(TextSettings.traits, expert=True)
    alphabet: ClassVar = "0123456789+-=,#<>;?"
    stops: ClassVar = (">",)

    @model_validator(mode="after")
    def _in_order(self) -> ChainsSettings:
        if not 2 <= self.terms[0] <= self.terms[1]:
            raise ValueError(f"terms = {list(self.terms)}: the fewest are 2 or more, and not above the most")
        if bool(self.tool) != (self.max_turns > 1):
            raise ValueError(f"max_turns = {self.max_turns}: a call takes a turn; use 1 without tool, more with it")
        return self

    def conversation(self) -> Conversation:
        if not self.tool:
            return Chain(self)
        chain = ToolChain(self)
        return chain if self.tool is True else WithPython(chain, self.sandbox, chain.code_in, chain.shown)


class ChainProblem(NamedTuple):
    """steps: sign and size of each term except the first."""

    first: int
    steps: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return f"{self.first}{''.join(f'{step:+d}' for step in self.steps)}="

    @property
    def totals(self) -> list[int]:
        return list(accumulate(self.steps, initial=self.first))


def draw_problem(random: Random, terms: tuple[int, int], largest_total: int | None) -> ChainProblem:
    """Draw a chain whose running totals lie in 0..`largest_total`."""
    total = first = random.randint(1, _LARGEST)
    steps = []
    for _ in range(random.randint(*terms) - 1):
        high = _LARGEST if largest_total is None else min(_LARGEST, largest_total - total)
        choices = [step for step in range(-min(_LARGEST, total), high + 1) if step]
        steps.append(random.choice(choices))
        total += steps[-1]
    return ChainProblem(first, tuple(steps))


class Chain:
    """Conversation with one message."""

    largest_total: int | None = _LARGEST

    def __init__(self, settings: ChainsSettings) -> None:
        self._terms = settings.terms
        self._problem = ChainProblem(0, ())
        self._teacher = Random(0)

    def begin(self, task: int, seed: int) -> str:  # noqa: ARG002 - there is one
        self._problem = draw_apart(seed, lambda random: draw_problem(random, self._terms, self.largest_total))
        self._teacher = Random(f"teacher {seed}")
        return self._problem.prompt

    def reply(self, message: str) -> Reply:
        right = message.rpartition("#")[2] == str(self._problem.totals[-1]) and "#" in message
        return Reply(reward=float(right), success=right)

    def expert(self) -> str:
        """All steps and the result; in four of five episodes, some steps and the total so far."""
        whole = self._teacher.randrange(_WHOLE) == 0
        totals, written = self._problem.totals, []
        for step, total in zip(self._problem.steps, totals[1:], strict=True):
            written.append(f"{step:+d}={total}")
            if not whole and self._teacher.random() < _GIVES_UP:
                break
        return f"{','.join(written)}#{totals[len(written)]}"


class ToolChain(Chain):
    """Conversation with a calculator, or with Python (`WithPython`): each message is a call or the result."""

    largest_total = None

    def __init__(self, settings: ChainsSettings) -> None:
        super().__init__(settings)
        self._calls = 0
        self._whole = False

    def begin(self, task: int, seed: int) -> str:
        prompt = super().begin(task, seed)
        self._calls, self._whole = 0, self._teacher.randrange(_WHOLE) == 0
        return prompt

    def reply(self, message: str) -> Reply:
        return super().reply(message) if self.code_in(message) is None else self._result(calculate(message))

    def code_in(self, message: str) -> str | None:
        """The expression of a call; None for a result."""
        return message.strip("<>") if message.startswith("<") else None

    def shown(self, outcome: ToolOutcome) -> Reply:
        """The reply to a call that was run as Python."""
        text = outcome.output.strip() if outcome.ended == "done" else ""
        return self._result(text if _NUMBER.fullmatch(text) else "?")

    def _result(self, text: str) -> Reply:
        self._calls += 1
        return Reply(text=f"{text};", done=False)

    def expert(self) -> str:
        """The next call, finally the result; in four of five episodes, the total so far after some calls."""
        totals, steps = self._problem.totals, self._problem.steps
        gives_up = self._calls > 0 and not self._whole and self._teacher.random() < _GIVES_UP
        if gives_up or self._calls == len(steps):
            return f"#{totals[self._calls]}"
        return f"<{totals[self._calls]}{steps[self._calls]:+d}>"


def calculate(call: str) -> str:
    """The result of a call such as `<8-2>`; `?` for an invalid call."""
    found = _CALL.fullmatch(call)
    if found is None:
        return "?"
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right)
