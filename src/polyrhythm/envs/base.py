"""The interface of an environment adapter: a batch of rows that step together.

Stepping and observing are separate calls, because rendering often costs more than physics and an action chunk
needs one observation only. Autoreset is off: a row that ended is unchanged until `reset`.
An adapter's file declares a frozen pydantic settings model with a `type` literal that is an `EnvSettings`;
heavy imports happen inside the functions. `config.catalog` describes its optional attributes (`needs`, `extra`,
`known_tasks`). `envs.conformance` has checks of this interface, for `polyrhythm check`.

`resets_beside = True` says that one thread may reset a row while another one resets, steps or observes other rows, or
calls another method of its batch for them (`BeginsSteps`, `TranscribesRows`); then `rollout.reset_ahead` may reset
spare rows for coming episodes (`stations.simulator.reset_ahead`).

`leaves_device = True` says that its batches have `suspend` and `resume` (`runtime.messages.Offloadable`): under
`placement.sharing: lease` a simulator of them is on its device in turn with other stations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs import EnvSpec, Trajectory, Transcript

#: Row numbers of a batch; stations pass arrays.
RowNumbers = Sequence[int] | NDArray[np.intp]


class StepResult(NamedTuple):
    """Outcome of one primitive env step for n rows, in the requested order: each [n].

    `truncated`: time limit reached; `success`: the task is solved at this step, as bool, or as int8 with -1 where the
    environment does not say; `metrics`: one array for each name of `spec.metrics`, with NaN where this step has no
    value; `executed` [n,C], where `spec.chunk`: which actions of the
    chunk were executed, the first ones of each row and at least one. The reward of such a step is that of the last.
    """

    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_] | NDArray[np.int8]
    metrics: Mapping[str, NDArray[np.floating]] = MappingProxyType({})
    executed: NDArray[np.bool_] | None = None


class EpisodeRefused(Exception):
    """An environment does not play an episode, such as one with a prompt that is too long: raised for rows of a `reset`
    or of `expert_actions` (`RowsFailed`). It is no failure: the task and seed is set aside at once."""


class RowsFailed(Exception):
    """Some rows of a `reset`, `step` or `expert_actions` raised, all others did what was asked: only the samples of the
    former fail.

    errors: row → its error. result: of the step, or the actions, with anything for rows that failed. These are not used
    again before their next reset, which makes them anew; but where rows step only together (`step_rows` false) they get
    no-ops, as rows without an episode do.
    """

    def __init__(self, errors: Mapping[int, Exception], result: Any = None) -> None:
        super().__init__("; ".join(f"row {row}: {type(e).__name__}: {e}" for row, e in errors.items()))
        self.errors, self.result = errors, result


def first_cause(error: Exception) -> Exception:
    """Of `RowsFailed` an error that no retry solves, if there is one, else the first row's; any other error itself."""
    if not isinstance(error, RowsFailed) or not error.errors:
        return error
    causes = list(error.errors.values())
    return next((cause for cause in causes if isinstance(cause, PolyrhythmError | ImportError)), causes[0])


@runtime_checkable
class EnvBatch(Protocol):
    """A vector environment of `rows` rows, numbered from zero.

    The station truncates an episode at `spec.max_steps` even if the environment does not. If a call raises, all of its
    rows have failed, unless it raises `RowsFailed`.
    """

    spec: EnvSpec
    rows: int

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each row: task index into `spec.tasks`, seed in 0..2^63-1.

        Equal (task, seed) gives an equal initial state. With `spec.reset_rows` false, `rows` is every row.
        """
        ...

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        """One primitive step; actions [n,A] in env units, or [n,C,A] with `spec.chunk` = C. With `spec.step_rows`
        false, `rows` is every row."""
        ...

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the current observation of the n rows into `out[name][i]` for i in 0..n-1 (n = len(rows)).

        The mapping `out` is read-only: write into its arrays, do not replace them.
        """
        ...

    def close(self) -> None:
        """Free all resources; called once."""
        ...


@runtime_checkable
class EnvSettings(Protocol):
    """Interface of an environment's settings model."""

    def spec(self) -> EnvSpec:
        """The spec of a batch, without building one. Raises ConfigError if there is no such environment."""
        ...

    def build(self, rows: int) -> EnvBatch:
        """Build a batch of `rows` rows. Raises ImportError or PolyrhythmError if this machine cannot run it."""
        ...


@runtime_checkable
class Wraps(Protocol):
    """Settings with the user's wrappers (each has its address in `apply`), applied to every environment in order."""

    wrappers: Sequence[Any]

    def model_copy(self, *, update: Mapping[str, Any]) -> EnvSettings:
        """The same settings with other values; that of pydantic."""
        ...


@runtime_checkable
class ObservesAhead(Protocol):
    """An env batch whose first observation after a reset is dear, such as that of a new model, and can be prepared."""

    def prepare_observation(self, row: int) -> None:
        """Do for the row what its next `observe` would do first. Called by the thread that reset it ahead, which is not
        the one that observes it."""
        ...


@runtime_checkable
class DiscardsRows(Protocol):
    """An env batch that keeps something of a row from episode to episode, such as a simulator, and can give it up."""

    def discard(self, row: int) -> None:
        """Give up what the row has: its numbers are not finite. It is not used again before its next reset, which makes
        it anew, as after `RowsFailed`."""
        ...


@runtime_checkable
class BeginsSteps(Protocol):
    """An env batch whose steps wait for something outside, such as the calls of a tool: begun early, those of different
    rows overlap. For environments whose step takes a whole chunk (`spec.chunk`)."""

    def begin_step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> None:
        """Begin what `step` of these rows with these actions will wait for, and return at once. Each row is stepped
        with them, dropped or reset afterwards, perhaps not all together. What fails is raised by `step`."""
        ...

    def drop_step(self, rows: RowNumbers) -> None:
        """End what was begun for these rows: they were cancelled, or `begin_step` or `step` has raised. They are reset
        next."""
        ...

    def waits(self, rows: RowNumbers) -> bool:
        """Whether `step` of these rows would wait now. False once it has waited too long: `step` says so then. Asked of
        no rows too: that alone has to make the descriptor unreadable."""
        ...

    def fileno(self) -> int:
        """A descriptor that can be read when `waits` may have changed since it was asked last."""
        ...


@runtime_checkable
class TranscribesRows(Protocol):
    """An env batch that can say what was said in a row, for who reads an evaluation."""

    def texts(self, row: int) -> Sequence[str]:
        """The prompt of the row's episode, then the policy's messages and the environment's replies in turn. Asked once
        the episode has ended, before the row's next reset."""
        ...


@runtime_checkable
class Transcribes(Protocol):
    """An environment's settings that can say what a sample is as text, for reward functions."""

    def transcribe(self, trajectory: Trajectory) -> Transcript:
        """The conversation of a finished sample."""
        ...


@runtime_checkable
class References(Protocol):
    """Environment settings with an answer to each prompt, for reward functions."""

    def reference(self, seed: int) -> Any:
        """The answer to the prompt of an episode with this seed."""
        ...


@runtime_checkable
class ChecksExpert(Protocol):
    """Environment settings that can tell before the start that the expert cannot demonstrate."""

    def check_expert(self, episodes: Sequence[tuple[int, int]]) -> None:
        """Raise ConfigError if the expert can act in none of these episodes, each a task and a seed."""
        ...


@runtime_checkable
class Expert(Protocol):
    """An env batch with a scripted expert, for demonstrations."""

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.generic]:
        """The scripted expert's action for the current state of each row: [n,A] in env units, [n,C,A] with
        `spec.chunk`."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """An env batch that can render a row for a video, for observations without an image."""

    def render(self, row: int) -> NDArray[np.uint8]:
        """Render the current state of the row: [H,W,3]. Raises ConfigError if this machine cannot."""
        ...


@runtime_checkable
class Renderable(Protocol):
    """Settings of an environment that can render its rows."""

    def rendering(self) -> EnvSettings | None:
        """The same settings, but with a `build` that returns a `Renderer`; None if they do not allow it."""
        ...
