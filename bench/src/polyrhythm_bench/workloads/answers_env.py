"""An environment of prompts that are answered once; the answers to some prompts all succeed, to some all fail."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.envs.base import RowNumbers, StepResult
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec, Task

Share = Annotated[float, Field(ge=0, le=1)]


class AnswersEnvSettings(BaseModel):
    """Observation: `state` float32 [1], always zero. Action: float32 [1], ignored. Reward: 1 for success.

    A prompt is a seed. From the others half succeed, as in simulated clusters.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    solved: Share = 0.0
    """Share of prompts of which every answer succeeds."""
    hopeless: Share = 0.0
    """Share of prompts of which none does."""

    def spec(self) -> EnvSpec:
        return EnvSpec(
            observation={"state": ArraySpec((1,), "float32")},
            action=ActionSpec("continuous", 1, low=(-1.0,), high=(1.0,)),
            tasks=(Task("answer", "answer"),),
            max_steps=1,
        )

    def build(self, rows: int) -> AnswersBatch:
        return AnswersBatch(self, rows)


class AnswersBatch:
    """Rows with a prompt each."""

    def __init__(self, settings: AnswersEnvSettings, rows: int) -> None:
        self.rows, self.spec, self._settings = rows, settings.spec(), settings
        self.chance = np.zeros(rows)
        self._rng = random.Random()

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:  # noqa: ARG002
        for row, seed in zip(rows, seeds, strict=True):
            drawn = random.Random(seed).random() - self._settings.solved
            self.chance[row] = 1.0 if drawn < 0 else 0.0 if drawn < self._settings.hopeless else 0.5

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:  # noqa: ARG002 (the contract's)
        success = np.array([self._rng.random() < self.chance[row] for row in rows], np.bool_)
        no = np.zeros(len(rows), np.bool_)
        return StepResult(success.astype(np.float32), ~no, no, success)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        out["state"][: len(rows)] = 0

    def close(self) -> None:
        """Nothing to free."""
