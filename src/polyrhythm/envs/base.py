"""The contract of an environment adapter: a batch of rows that step together.

Stepping and observing are separate calls, because rendering often costs more than physics and an action chunk
needs one observation only. Autoreset is off: a row that ended stays as it is until `reset`.
An adapter's file declares a frozen pydantic settings model with a `type` literal that is an `EnvSettings`;
heavy imports happen inside the functions. What it may say of itself besides (`needs`, `extra`, `known_tasks`) stands in
`config.catalog`. `envs.conformance` holds the contract as checks, for `polyrhythm check`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyrhythm.specs import EnvSpec

#: Rows of a batch by their numbers; stations hold them as arrays.
RowNumbers = Sequence[int] | NDArray[np.intp]


class StepResult(NamedTuple):
    """Outcome of one primitive env step for n rows, in the order asked: each [n].

    `truncated` is the time limit; `success` is the task's own measure at this step; `metrics` has a number for each
    name of `spec.metrics`, NaN where this step has none, and nothing else.
    """

    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_]
    metrics: Mapping[str, NDArray[np.floating]] = MappingProxyType({})


@runtime_checkable
class EnvBatch(Protocol):
    """A vector environment of `rows` rows, numbered from zero.

    An episode that reaches `spec.max_steps` is cut by the station even if the environment does not say so.
    """

    spec: EnvSpec
    rows: int

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each row: task index into `spec.tasks`, seed in 0..2^63-1.

        Equal (task, seed) gives an equal initial state. With `spec.reset_rows` false, `rows` is every row.
        """
        ...

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        """One primitive step; actions [n,A] in env units. With `spec.step_rows` false, `rows` is every row."""
        ...

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the present observation of the n rows into `out[name][i]` for i in 0..n-1 (n = len(rows)).

        `out` is read-only: its arrays are where the observation stays, so an array that replaced one would be lost.
        """
        ...

    def close(self) -> None:
        """Free everything; called once."""
        ...


@runtime_checkable
class EnvSettings(Protocol):
    """What the settings model of an environment offers beside its fields."""

    def spec(self) -> EnvSpec:
        """What a batch will offer, without building one. ConfigError: there is no such environment."""
        ...

    def build(self, rows: int) -> EnvBatch:
        """A batch of `rows` rows; ImportError or PolyrhythmError if this machine cannot run it."""
        ...


@runtime_checkable
class Expert(Protocol):
    """An env batch that can also act by itself, for demonstrations."""

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.float32]:
        """The scripted expert's action for the present state of each row: [n,A] in env units."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """An env batch that can draw a row for people, where no observation is a picture."""

    def render(self, row: int) -> NDArray[np.uint8]:
        """The present state of the row: [H,W,3]. ConfigError: this machine lacks what it takes."""
        ...


@runtime_checkable
class Renderable(Protocol):
    """Settings of an environment that can draw its rows for people."""

    def rendering(self) -> EnvSettings | None:
        """The same settings, whose `build` gives a `Renderer`; None where these do not allow it."""
        ...
