"""Observation, action and task specs of an environment.

An environment declares its `EnvSpec` before anything expensive starts; a policy is built from the spec alone, so
environments and policies never import each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import numpy as np

#: Observation key that the simulator station adds: index of the instruction in `EnvSpec.tasks`, int64 [].
INSTRUCTION = "instruction"
#: Observation key that the simulator station adds: env steps done / `EnvSpec.max_steps`, float32 [], in 0..1.
PROGRESS = "progress"
#: How a metric is aggregated over the env steps of an episode.
Aggregate = Literal["last", "sum", "mean", "max"]
#: Maximum number of metrics of an environment, and the pattern of their names.
MAX_METRICS, METRIC_NAME = 32, re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape of one row (no batch dimension) and numpy dtype name of an array. Raises ValueError if invalid."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if any(not isinstance(size, int | np.integer) or size < 1 for size in self.shape):
            raise ValueError(f"an array's shape has integers above 0, got {self.shape}")
        try:
            kind = np.dtype(self.dtype).kind
        except TypeError:
            kind = "O"
        if kind not in "biuf":
            raise ValueError(f"an array's dtype is the name of a numeric dtype or bool, as float32; got {self.dtype!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class ActionSpec:
    """One primitive action of A = `dim` entries. Raises ValueError if invalid.

    `continuous`: float32 [A] within `low`..`high` (both of length A, in the environment's units).

    `discrete`: int64 [A], entry i in 0..`counts[i]`-1; `low` and `high` are empty. counts: of length A, by default
    `choices` for each; choices: the largest count. stops: choices that end a chunk, such as an end-of-text token; only
    for environments whose step takes whole chunks.
    """

    kind: Literal["continuous", "discrete"]
    dim: int
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    choices: int = 0
    stops: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("low", float), ("high", float), ("stops", int), ("counts", int)):  # may be arrays
            object.__setattr__(self, name, tuple(kind(entry) for entry in getattr(self, name)))
        object.__setattr__(self, "choices", int(self.choices or max(self.counts, default=0)))
        entries = self.dim if self.kind == "discrete" else 0
        object.__setattr__(self, "counts", self.counts or (self.choices,) * entries)
        if not all(0 <= stop < self.choices for stop in self.stops):
            raise ValueError(f"stops are among an action's {self.choices} choices, got {self.stops}")
        bounds = len(self.low), len(self.high)
        if self.dim < 1:
            raise ValueError(f"an action has 1 or more entries, got dim = {self.dim}")
        if self.kind == "continuous":
            if bounds != (self.dim, self.dim):
                raise ValueError(f"an action of {self.dim} entries has as many bounds, got {bounds[0]} and {bounds[1]}")
            if not all(low < high for low, high in zip(self.low, self.high, strict=True)):
                raise ValueError(f"an action's low is below its high, got {self.low} and {self.high}")
        elif self.kind != "discrete":
            raise ValueError(f"an action is continuous or discrete, got kind = {self.kind!r}")
        elif bounds != (0, 0) or self.choices < 2:
            raise ValueError(f"a discrete action has 2 or more choices and no bounds, got {self.choices} and {bounds}")
        elif len(self.counts) != self.dim or min(self.counts) < 1 or max(self.counts) != self.choices:
            raise ValueError(
                f"a discrete action has {self.dim} counts, of which the largest is choices; got {self.counts} and "
                f"{self.choices}"
            )

    @property
    def dtype(self) -> str:
        return "float32" if self.kind == "continuous" else "int64"


@dataclass(frozen=True, slots=True)
class Task:
    """A task. name: in the simulator; instruction: for the policy; suite: for evaluation metrics by suite, if any."""

    name: str
    instruction: str
    suite: str = ""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Observations, actions, tasks and abilities of an env batch. Raises ValueError if invalid.

    observation: per-row arrays that the environment writes (`INSTRUCTION` and `PROGRESS` are added).

    max_steps: primitive env steps after which an episode is truncated.

    reset_rows: rows can be reset on their own; otherwise the batch's episodes begin together.

    step_rows: rows can be stepped on their own; otherwise a parked row gets a no-op whose output is discarded.

    reports_success: False: the environment has no notion of success, so `StepResult.success` is ignored, and success
    rates are null. None: each step reports whether it is known; -1 is unknown.

    chunk: length of the chunks that one step takes as a whole, as a text environment takes a message: actions [n,C,A],
    and its result marks the executed ones; policies then have chunks of this length. 0: a step takes one action.

    metrics: name → how the values of `StepResult.metrics` are aggregated over an episode; at most `MAX_METRICS`.

    initial_states: number of fixed initial states of each task; an episode of seed s begins in number s mod that many.
    An evaluation takes each of them in turn. 0: initial states are drawn from the seed.

    training_states: number of initial states of each task in training, if they come from a data set; an episode of seed
    s begins in number s mod that many. Evaluations then have `initial_states` others: `HELD_OUT` in the seed
    distinguishes them. An epoch of training takes each once, in a new order. 0: training has no epochs.

    data: a hash of the data set, which must be equal in a resumed run and in joined simulators; "" without one.
    """

    observation: Mapping[str, ArraySpec]
    action: ActionSpec
    tasks: tuple[Task, ...]
    max_steps: int
    reset_rows: bool = True
    step_rows: bool = True
    metrics: Mapping[str, Aggregate] = field(default_factory=dict)
    reports_success: bool | None = None
    initial_states: int = 0
    chunk: int = 0
    training_states: int = 0
    data: str = ""

    def differing(self, other: EnvSpec) -> Iterator[tuple[str, Any, Any]]:
        """Name, value here and value there of each field that differs."""
        for one in fields(self):
            here, there = getattr(self, one.name), getattr(other, one.name)
            if here != there:
                yield one.name, here, there

    def __post_init__(self) -> None:
        if self.observation.keys() & {INSTRUCTION, PROGRESS}:
            raise ValueError(
                f"no observation may be named {INSTRUCTION} or {PROGRESS}, which are added; got {[*self.observation]}"
            )
        names = [task.name for task in self.tasks]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"an environment has one task or more, each with a different name; got {names}")
        if self.max_steps < 1:
            raise ValueError(f"an environment's max_steps is 1 or more, got {self.max_steps}")
        if self.initial_states < 0:
            raise ValueError(f"an environment's initial_states is 0 or more, got {self.initial_states}")
        if self.training_states < 0 or (self.training_states and not self.initial_states):
            raise ValueError(
                f"an environment's training_states is 0 or more, and 0 without initial_states; got "
                f"{self.training_states}"
            )
        if self.chunk < 0 or (self.chunk and not self.step_rows):
            raise ValueError(f"an environment's chunk is 0 or more, and 0 without step_rows; got {self.chunk}")
        if self.action.stops and not self.chunk:
            raise ValueError("an action's stops end a chunk, but a step here takes one action; set chunk")
        check_metrics(self.metrics)


def check_metrics(metrics: Mapping[str, str]) -> None:
    """Raise ValueError if a name or aggregate is invalid, or there are too many metrics."""
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"an environment has at most {MAX_METRICS} metrics, got {len(metrics)}")
    for name, aggregate in metrics.items():
        if not METRIC_NAME.fullmatch(name):
            raise ValueError(f"a metric's name is of letters, digits and _.-, letter first, 64 at most; got {name!r}")
        if aggregate not in get_args(Aggregate):
            raise ValueError(f"metric {name} is {', '.join(get_args(Aggregate))} of its steps; got {aggregate!r}")
