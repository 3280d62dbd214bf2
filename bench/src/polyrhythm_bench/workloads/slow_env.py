"""A wrapper that makes any environment slow: every call to `step` sleeps first. It imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings, RowNumbers, StepResult
from polyrhythm.specs import EnvSpec


def _env(value: Any) -> BaseModel:
    return resolve("env", value)


class SlowEnvSettings(BaseModel):
    """The environment `env`, whose env batch takes `step_ms` longer for each step, whatever the number of rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    type: str
    """This class as module:Class."""
    env: Annotated[SerializeAsAny[BaseModel], BeforeValidator(_env)]
    """The environment's own settings, by type."""
    step_ms: Annotated[float, Field(ge=0)]
    """Milliseconds that a call to step sleeps."""

    def spec(self) -> EnvSpec:
        return self._settings.spec()

    def build(self, rows: int) -> SlowBatch:
        return SlowBatch(self._settings.build(rows), self.step_ms / 1000.0, time.sleep)

    @property
    def _settings(self) -> EnvSettings:
        assert isinstance(self.env, EnvSettings)
        return self.env


class SlowBatch:
    """An env batch that sleeps `seconds` before each step. `sleep` is a parameter so that tests need no real time."""

    def __init__(self, batch: EnvBatch, seconds: float, sleep: Callable[[float], None]) -> None:
        self.rows, self.spec = batch.rows, batch.spec
        self._batch, self._seconds, self._sleep = batch, seconds, sleep

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._batch.reset(rows, tasks, seeds)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        self._sleep(self._seconds)
        return self._batch.step(rows, actions)

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._batch.observe(rows, out)

    def close(self) -> None:
        self._batch.close()
