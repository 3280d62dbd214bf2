"""Arguments and result of a reward function (`scoring.function`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.specs.trajectory import Trajectory


class Score(NamedTuple):
    """reward: added to the environment's reward for the sample's last action. success: of the episode, replacing the
    environment's; None keeps the environment's."""

    reward: float
    success: bool | None = None


class Transcript(NamedTuple):
    """A conversation as text. prompt: before the first message; messages: the model's, in order. text: everything,
    including the environment's replies."""

    prompt: str
    messages: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SampleView:
    """A finished sample as a reward function sees it.

    task: its name; seed: with which the environment began the episode; evaluation: whether it is an evaluation's.
    prompt, messages, text: of a text environment (`Transcript`), else empty; reply: the last message. terminated: false
    where the episode was cut, such as a message longer than `env.max_new_tokens`. success, episode_return: the
    environment's own; success is false where it reports none.
    trajectory: all of it; its arrays cannot be written, and are valid until the function returns. reference: the answer
    to the prompt in the environment's data; None without data.
    """

    task: str
    seed: int
    evaluation: bool
    prompt: str
    messages: tuple[str, ...]
    text: str
    terminated: bool
    success: bool
    episode_return: float
    trajectory: Trajectory
    reference: Any = None

    @property
    def reply(self) -> str:
        return self.messages[-1] if self.messages else ""


def with_score(sample: Trajectory, score: float) -> Trajectory:
    """The sample with the score added to the reward of its last executed action; the given sample is unchanged."""
    rewards = sample.rewards.copy()
    last = int(np.flatnonzero(sample.valid[-1])[-1])
    rewards[-1, last] += score
    return replace(sample, rewards=rewards)
