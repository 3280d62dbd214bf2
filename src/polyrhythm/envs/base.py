"""The interface of an environment adapter: a batch of rows that step together.

Stepping and observing are separate calls, because rendering often costs more than physics and an action chunk
needs one observation only. Autoreset is off: a row that ended is unchanged until `reset`.
An adapter's file declares a frozen pydantic settings model with a `type` literal that is an `EnvSettings`;
heavy imports happen inside the functions. `config.catalog` describes its optional attributes (`needs`, `extra`,
`known_tasks`). `envs.conformance` has checks of this interface, for `polyrhythm check`.

What an environment does beyond this is declared: `traits: ClassVar = EnvTraits(...)` of its settings. Without it the
methods that are there count (`traits_of`, `batch_traits`, the only functions that look for them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.variants import Variant
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

    @classmethod
    def zeros(cls, rows: int) -> StepResult:
        """No reward, no end and no success, to be filled in."""
        no = (np.zeros(rows, np.bool_) for _ in range(3))
        return cls(np.zeros(rows, np.float32), next(no), next(no), next(no))


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


#: Members of an `EnvBatch`.
REQUIRED = ("spec", "rows", "reset", "step", "observe", "close")


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


@dataclass(frozen=True, slots=True)
class EnvTraits:
    """What an environment does beyond `EnvSettings` and `EnvBatch`. Each trait with methods has them in
    `FullEnvSettings` or `FullEnvBatch`; `envs.conformance` checks that they are there."""

    resets_ahead: Annotated[
        bool, "one thread may reset a row while another calls any method for other rows (rollout.reset_ahead)"
    ] = False
    own_process: Annotated[bool, "an env batch is in a process of its own, which makes one call at a time"] = False
    leaves_device: Annotated[bool, "its batches can leave their device and come back (placement.sharing=lease)"] = False
    wraps: Annotated[bool, "its settings have the user's wrappers"] = False
    variants: Annotated[bool, "it has variants out of distribution (eval --variants)"] = False
    rendering: Annotated[bool, "its settings can be changed to ones whose batches draw their rows (eval --video)"] = (
        False
    )
    transcribes: Annotated[bool, "its samples can be written as conversations, for reward functions"] = False
    references: Annotated[bool, "its prompts have reference answers, for reward functions"] = False
    checks_expert: Annotated[bool, "it tells before the start that its expert cannot act"] = False
    expert: Annotated[bool, "its batches have a scripted expert, for demonstrations"] = False
    draws_rows: Annotated[bool, "its batches draw their rows, for videos without image observations"] = False
    discards_rows: Annotated[bool, "its batches can give up what they keep of a row whose numbers are not finite"] = (
        False
    )
    prepares_observations: Annotated[bool, "the first observation of a reset ahead is prepared ahead too"] = False
    async_steps: Annotated[bool, "steps that wait for something outside overlap; needs EnvSpec.chunk"] = False
    texts: Annotated[bool, "its batches have the texts of an episode that has ended, for evaluations"] = False


#: Trait → the methods that come with it.
SETTINGS_METHODS: Mapping[str, tuple[str, ...]] = {
    "variants": ("variants",),
    "rendering": ("rendering",),
    "transcribes": ("transcribe",),
    "references": ("reference",),
    "checks_expert": ("check_expert",),
}
BATCH_METHODS: Mapping[str, tuple[str, ...]] = {
    "leaves_device": ("suspend", "resume"),
    "expert": ("expert_actions",),
    "draws_rows": ("render",),
    "discards_rows": ("discard",),
    "prepares_observations": ("prepare_observation",),
    "async_steps": ("begin_step", "drop_step", "waits", "fileno"),
    "texts": ("texts",),
}


class FullEnvSettings(EnvSettings, Protocol):
    """Settings with all optional members; which are there, `traits_of` says."""

    wrappers: Sequence[Any]
    """The user's wrappers, applied to every environment in order; each has its address in `apply`."""

    def model_copy(self, *, update: Mapping[str, Any]) -> EnvSettings:
        """The same settings with other values; that of pydantic."""
        ...

    def variants(self) -> Mapping[str, Variant]:
        """The variants that these settings allow, by name."""
        ...

    def rendering(self) -> EnvSettings | None:
        """The same settings, but with batches that draw their rows; None if they do not allow it."""
        ...

    def transcribe(self, trajectory: Trajectory) -> Transcript:
        """The conversation of a finished sample."""
        ...

    def reference(self, seed: int) -> Any:
        """The answer to the prompt of an episode with this seed."""
        ...

    def check_expert(self, episodes: Sequence[tuple[int, int]]) -> None:
        """Raise ConfigError if the expert can act in none of these episodes, each a task and a seed."""
        ...


class FullEnvBatch(EnvBatch, Protocol):
    """An env batch with all optional methods; which are there, `batch_traits` says."""

    def suspend(self) -> int:
        """Move what it keeps on its device to the host; returns the bytes freed. Called between two other calls."""
        ...

    def resume(self) -> None:
        """Bring it back unchanged."""
        ...

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.generic]:
        """The scripted expert's action for the current state of each row: [n,A] in env units, [n,C,A] with
        `spec.chunk`."""
        ...

    def render(self, row: int) -> NDArray[np.uint8]:
        """Render the current state of the row: [H,W,3]. Raises ConfigError if this machine cannot."""
        ...

    def discard(self, row: int) -> None:
        """Give up what is kept of the row from episode to episode, such as a simulator: its numbers are not finite. It
        is not used again before its next reset, which makes it anew, as after `RowsFailed`."""
        ...

    def prepare_observation(self, row: int) -> None:
        """Do for the row what its next `observe` would do first. Called by the thread that reset it ahead, which is not
        the one that observes it."""
        ...

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

    def texts(self, row: int) -> Sequence[str]:
        """The prompt of the row's episode, then the policy's messages and the environment's replies in turn. Asked once
        the episode has ended, before the row's next reset."""
        ...


def traits_of(settings: object) -> EnvTraits:
    """The traits of an environment's settings, or of their class: those that `traits` declares, and those of the
    methods that it has; `resets_beside` and `leaves_device` of a class count as declared."""
    declared = getattr(settings, "traits", None)
    found = {name for name, methods in SETTINGS_METHODS.items() if _has(settings, methods)}
    found |= {"resets_ahead"} if getattr(settings, "resets_beside", False) else set()
    found |= {"leaves_device"} if getattr(settings, "leaves_device", False) else set()
    return replace(declared if isinstance(declared, EnvTraits) else EnvTraits(), **dict.fromkeys(found, True))


def batch_traits(batch: object) -> EnvTraits:
    """The traits of an env batch: its own `traits`, else those of the methods that it has."""
    declared = getattr(batch, "traits", None)
    if isinstance(declared, EnvTraits):
        return declared
    return EnvTraits(**{name: _has(batch, methods) for name, methods in BATCH_METHODS.items()})


def _has(env: object, methods: Sequence[str]) -> bool:
    return all(callable(getattr(env, name, None)) for name in methods)
