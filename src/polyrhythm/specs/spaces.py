"""What an environment shows and accepts, as plain data.

An environment declares its `EnvSpec` before anything expensive starts; a policy is built from it alone, so
the two never import each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: Observation key that the simulator station adds: index into `EnvSpec.tasks` of the instruction shown, int64 [].
INSTRUCTION = "instruction"
#: Observation key that the simulator station adds: env steps done / `EnvSpec.max_steps`, float32 [], in 0..1.
PROGRESS = "progress"


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape of one row (no batch dimension) and numpy dtype name of an array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One primitive action of A = `dim` entries.

    `continuous`: float32 [A] within `low`..`high` (both of length A, in the environment's units).
    `discrete`: int64 [A], each entry in 0..`choices`-1; `low` and `high` are empty.
    """

    kind: Literal["continuous", "discrete"]
    dim: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    choices: int = 0

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"


@dataclass(frozen=True, slots=True)
class Task:
    """A task by its simulator name, and the sentence that tells a policy to do it."""

    name: str
    instruction: str


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What one env batch offers.

    observation: per-row arrays that the environment writes (`INSTRUCTION` and `PROGRESS` are added on top).
    max_steps: primitive env steps after which an episode is truncated.
    reset_rows: rows can be reset on their own; otherwise the batch's episodes begin together.
    step_rows: rows can be stepped on their own; otherwise a parked row gets a no-op whose output is discarded.
    """

    observation: Mapping[str, ArraySpec]
    action: ActionSpec
    tasks: tuple[Task, ...]
    max_steps: int
    reset_rows: bool = True
    step_rows: bool = True
