"""Interface of an environment adapter: a batch of rows that step together.

Stepping and observing are separate calls, because rendering often costs more than physics and an action chunk needs
only one observation. Autoreset is off: a row that ended is unchanged until `reset`. An adapter's file declares a frozen
pydantic settings model with a `type` literal that is an `EnvSettings`, and imports heavy packages inside functions.
`config.catalog` describes its optional attributes (`needs`, `extra`, `known_tasks`). Further abilities are declared by
`traits: ClassVar = EnvTraits(...)` of the settings, or else inferred from the methods (`traits_of`, `batch_traits`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation
from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs import EnvSpec, Trajectory, Transcript

#: Row numbers of a batch; stations pass arrays.
RowNumbers = Sequence[int] | NDArray[np.intp]


class StepResult(NamedTuple):
    """Outcome of one primitive env step for n rows, in the requested order: each [n].

    truncated: time limit reached; success: the task is solved at this step, as bool, or as int8 with -1 for not
    reported; metrics: one array for each name of `spec.metrics`, NaN where this step has no value; executed [n,C], with
    `spec.chunk`: marks the executed actions, at least one, at the start of each row's chunk; the reward then is that of
    the whole step.
    """

    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    success: NDArray[np.bool_] | NDArray[np.int8]
    metrics: Mapping[str, NDArray[np.floating]] = MappingProxyType({})
    executed: NDArray[np.bool_] | None = None

    @classmethod
    def zeros(cls, rows: int) -> StepResult:
        """Result without rewards, ends and successes, to be filled in."""
        no = (np.zeros(rows, np.bool_) for _ in range(3))
        return cls(np.zeros(rows, np.float32), next(no), next(no), next(no))


class EpisodeRefused(Exception):
    """The environment cannot play an episode, for instance because its prompt is too long.

    Raised for rows of a `reset` or of `expert_actions` (`RowsFailed`). It is not a failure: the task and seed is
    quarantined at once.
    """


class RowsFailed(Exception):
    """Some rows of a `reset`, `step` or `expert_actions` raised; the call succeeded for all others.

    Only the samples of failed rows fail. errors: row → its error. result: of the step, or the actions, with arbitrary
    values for failed rows. A failed row is not used before its next reset, which must rebuild it; but if rows step only
    together (`step_rows` false) it gets no-ops, like a row without an episode.
    """

    def __init__(self, errors: Mapping[int, Exception], result: Any = None) -> None:
        super().__init__("; ".join(f"row {row}: {type(e).__name__}: {e}" for row, e in errors.items()))
        self.errors, self.result = errors, result


def first_cause(error: Exception) -> Exception:
    """For `RowsFailed`, an error that no retry solves, else the first row's error; any other error itself."""
    if not isinstance(error, RowsFailed) or not error.errors:
        return error
    causes = list(error.errors.values())
    return next((cause for cause in causes if isinstance(cause, PolyrhythmError | ImportError)), causes[0])


#: Required members of an `EnvBatch`.
REQUIRED = ("spec", "rows", "reset", "step", "observe", "close")


class EnvBatch(Protocol):
    """A vector environment of `rows` rows, numbered from zero.

    The station truncates an episode at `spec.max_steps` even if the environment does not. An exception other than
    `RowsFailed` fails all rows of the call.
    """

    spec: EnvSpec
    rows: int

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin an episode in each row: task index into `spec.tasks`, seed in 0..2^63-1.

        Equal (task, seed) gives an equal initial state. With `spec.reset_rows` false, `rows` is every row.
        """

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        """Take one primitive step; actions [n,A] in env units, or [n,C,A] with `spec.chunk` = C.

        With `spec.step_rows` false, `rows` is every row.
        """

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        """Write the current observation of the n rows into `out[name][i]` for i in 0..n-1 (n = len(rows)).

        The mapping `out` is read-only: write into its arrays, do not replace them.
        """

    def close(self) -> None:
        """Free all resources; called once."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A change of an environment on which a policy was not trained, for `polyrhythm eval RUN --variants NAME`.

    kind: aspect that is new to the policy, as in RLinf's table of results out of distribution; what: the difference, in
    words; settings: changes of the section `env`, so a recipe can contain it too.
    """

    kind: Literal["vision", "semantic", "position"]
    what: str
    settings: Mapping[str, Any]


@runtime_checkable
class EnvSettings(Protocol):
    """Interface of an environment's settings model."""

    def spec(self) -> EnvSpec:
        """Spec of a batch, without building one. ConfigError: there is no such environment."""

    def build(self, rows: int) -> EnvBatch:
        """Build a batch of `rows` rows. ImportError or PolyrhythmError: this machine cannot run it."""


@dataclass(frozen=True, slots=True)
class EnvTraits:
    """Abilities of an environment beyond `EnvSettings` and `EnvBatch`.

    Their methods are in `FullEnvSettings` and `FullEnvBatch`; `polyrhythm check` checks that they exist.
    """

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
    observes_on_device: Annotated[
        bool, "its batches have observations as tensors on their device, which generators there read there"
    ] = False


#: Methods that a trait requires.
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
    "observes_on_device": ("observe_on_device",),
}


class FullEnvSettings(EnvSettings, Protocol):
    """Settings with all optional members; `traits_of` tells which ones exist."""

    wrappers: Sequence[Any]
    """The user's wrappers, applied to every environment in order; each has its address in `apply`."""

    def model_copy(self, *, update: Mapping[str, Any]) -> EnvSettings:
        """Pydantic's: the same settings with other values."""

    def variants(self) -> Mapping[str, Variant]:
        """Variants that these settings allow, by name."""

    def rendering(self) -> EnvSettings | None:
        """The same settings with batches that draw their rows; None if that is impossible."""

    def transcribe(self, trajectory: Trajectory) -> Transcript:
        """The conversation of a finished sample."""

    def reference(self, seed: int) -> Any:
        """Reference answer to the prompt of an episode with this seed."""

    def check_expert(self, episodes: Sequence[tuple[int, int]]) -> None:
        """Raise ConfigError if the expert can act in none of these episodes, each (task, seed)."""


class FullEnvBatch(EnvBatch, Protocol):
    """An env batch with all optional methods; `batch_traits` tells which ones exist."""

    def suspend(self) -> int:
        """Move the state on its device to the host; returns the bytes freed. Called between two other calls."""

    def resume(self) -> None:
        """Move the suspended state back to the device, unchanged."""

    def expert_actions(self, rows: RowNumbers) -> NDArray[np.generic]:
        """The scripted expert's action for the current state of each row: [n,A] in env units, [n,C,A] with
        `spec.chunk`."""

    def render(self, row: int) -> NDArray[np.uint8]:
        """Render the current state of the row: [H,W,3]. ConfigError: this machine cannot."""

    def discard(self, row: int) -> None:
        """Drop state of the row that outlives episodes, such as a simulator, because its numbers are not finite.

        The row is not used before its next reset, which must rebuild it, as after `RowsFailed`.
        """

    def prepare_observation(self, row: int) -> None:
        """Do the first part of the row's next `observe` ahead of time, in the thread that reset the row, not the
        observing one."""

    def begin_step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> None:
        """Start the part of `step` that waits, and return at once.

        Each row is later stepped with these actions, dropped or reset, possibly not all together. Failures are raised
        by `step`.
        """

    def drop_step(self, rows: RowNumbers) -> None:
        """Abandon the begun steps of these rows: they were cancelled, or `begin_step` or `step` has raised. A reset
        follows."""

    def waits(self, rows: RowNumbers) -> bool:
        """Whether `step` of these rows would block now.

        False once the wait has timed out, which `step` then reports. A call, even for no rows, must make the descriptor
        unreadable.
        """

    def fileno(self) -> int:
        """A descriptor that becomes readable when `waits` may have changed since its last call."""

    def observe_on_device(self, rows: RowNumbers) -> Mapping[str, Any]:
        """As `observe`, in torch's tensors [n, ...] on the batch's device, of the spec's shapes and dtypes."""

    def texts(self, row: int) -> Sequence[str]:
        """Prompt of the row's episode, then the policy's messages and the environment's replies in turn.

        Called after the episode has ended, before the row's next reset.
        """


def traits_of(settings: object) -> EnvTraits:
    """Traits of an environment's settings or settings class: the declared ones and those of existing methods.

    The class attributes `resets_beside` and `leaves_device` count as declared traits.
    """
    declared = getattr(settings, "traits", None)
    found = {name for name, methods in SETTINGS_METHODS.items() if _has(settings, methods)}
    found |= {"resets_ahead"} if getattr(settings, "resets_beside", False) else set()
    found |= {"leaves_device"} if getattr(settings, "leaves_device", False) else set()
    return replace(declared if isinstance(declared, EnvTraits) else EnvTraits(), **dict.fromkeys(found, True))


def batch_traits(batch: object) -> EnvTraits:
    """Traits of an env batch: its own `traits`, else those of its methods."""
    declared = getattr(batch, "traits", None)
    return declared if isinstance(declared, EnvTraits) else method_traits(batch)


def method_traits(batch: object) -> EnvTraits:
    """Traits of an env batch by its methods alone."""
    return EnvTraits(**{name: _has(batch, methods) for name, methods in BATCH_METHODS.items()})


def wrapped_traits(wrapper: object, inner: EnvTraits) -> EnvTraits:
    """Traits of a batch that wraps one with the traits `inner`: those whose methods the wrapper has too."""
    return EnvTraits(**{name: asdict(inner)[name] and _has(wrapper, names) for name, names in BATCH_METHODS.items()})


def _has(env: object, methods: Sequence[str]) -> bool:
    return all(callable(getattr(env, name, None)) for name in methods)


def as_utf8(text: str) -> str:
    """Replace lone surrogates, which no message can carry."""
    return text.encode(errors="replace").decode()


def check_result(result: object, rows: int, metrics: Collection[str], chunk: int = 0) -> None:
    """Raise ContractViolation unless this is a StepResult of [rows] numbers and flags, with [rows] numbers for each of
    these metrics, and `executed` [rows,chunk] if a step takes a chunk."""
    if not isinstance(result, StepResult):
        raise ContractViolation(
            f"step returned a {type(result).__name__}", "return StepResult(reward, terminated, truncated, success)"
        )
    if set(result.metrics) != set(metrics):
        raise ContractViolation(
            f"step returned the metrics {sorted(result.metrics)}, the spec declares {sorted(metrics)}",
            "make them equal (NaN for a step without a value)",
        )
    numbers = {"reward": result.reward, **{f"metrics[{name}]": array for name, array in result.metrics.items()}}
    flags = {"terminated": result.terminated, "truncated": result.truncated, "success": result.success}
    success: NDArray[Any] = np.asarray(result.success)
    if isinstance(result.success, np.ndarray) and success.dtype == np.int8 and np.isin(success, (-1, 0, 1)).all():
        flags["success"] = success > 0
    if chunk or result.executed is not None:
        _check_executed(result.executed, rows, chunk)
    for name, array in {**numbers, **flags}.items():
        kinds, dtype = ("b", "bool") if name in flags else ("fiub", "float32")
        found = np.asarray(array)
        if not isinstance(array, np.ndarray) or found.shape != (rows,) or found.dtype.kind not in kinds:
            raise ContractViolation(
                f"step returned {name} as {type(array).__name__} of shape {list(found.shape)} and {found.dtype}",
                f"return an array of shape [{rows}] and {dtype}",
            )


def _check_executed(executed: object, rows: int, chunk: int) -> None:
    if not chunk:
        raise ContractViolation("step returned executed, the spec has no chunk", "leave it out, or set the chunk")
    if not isinstance(executed, np.ndarray) or executed.shape != (rows, chunk) or executed.dtype != np.bool_:
        found = np.asarray(executed)
        raise ContractViolation(
            f"step returned executed as {type(executed).__name__} of shape {list(found.shape)} and {found.dtype}",
            f"return an array of shape [{rows}, {chunk}] and bool",
        )
    if not executed[:, 0].all() or (executed[:, 1:] & ~executed[:, :-1]).any():
        raise ContractViolation(
            "step returned executed with a gap", "it is true for the first actions of each row, one or more, only"
        )
