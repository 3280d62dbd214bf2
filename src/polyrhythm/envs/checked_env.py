"""Wraps an environment to announce its calls and check the form of their results.

Plays an episode of a text environment before a run, for checks of code that is called only after one. Others are not
stepped, since random actions may break what they move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation, violation_of
from polyrhythm.envs.base import (
    REQUIRED,
    EnvSettings,
    EpisodeRefused,
    FullEnvBatch,
    RowNumbers,
    RowsFailed,
    StepResult,
    batch_traits,
    first_cause,
    traits_of,
)
from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs import EnvSpec, Trajectory, split_seed
from polyrhythm.specs.hashing import mix

#: Maximum number of seeds tried for an episode, since some may be refused.
_SEEDS = 32

Arrays = dict[str, NDArray[Any]]


class CheckedEnv:
    """The env batch of `settings`, with `rows` rows. about_to: called with the name of each call before it begins."""

    def __init__(self, settings: EnvSettings, rows: int, about_to: Callable[[str], None]) -> None:
        self._call = partial(_call, about_to)
        self.settings, self.declared = settings, traits_of(settings)
        self.spec = read_spec(settings, about_to)
        self.inner: FullEnvBatch = self._call("build", settings.build, rows)
        self.rows = rows
        if missing := [name for name in REQUIRED if not hasattr(self.inner, name)]:
            what = f"a {type(self.inner).__name__} without {', '.join(missing)}"
            raise ContractViolation(f"build({rows}) returned {what}", "return an EnvBatch")
        if self.inner.rows != rows:
            raise ContractViolation(f"build({rows}) returned rows = {self.inner.rows}", f"it must have {rows} rows")
        for name, actual, expected in self.inner.spec.differing(self.spec):
            raise ContractViolation(
                f"the spec of build({rows}) has {name} = {actual}, that of the settings {expected}",
                "return the same spec from both",
            )
        self.traits = batch_traits(self.inner)

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes; for refused ones (`EpisodeRefused`) the next seeds are tried."""
        self._call("reset", self._reset, rows, tasks, seeds)

    def _reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        for again in range(_SEEDS):
            try:
                self.inner.reset(rows, tasks, [seed + again for seed in seeds])
            except RowsFailed as failed:
                last = again == _SEEDS - 1
                if last or not all(isinstance(error, EpisodeRefused) for error in failed.errors.values()):
                    raise
                kept = [i for i, row in enumerate(rows) if row in failed.errors]
                rows, tasks, seeds = [rows[i] for i in kept], [tasks[i] for i in kept], [seeds[i] for i in kept]
            else:
                return

    def step(self, rows: RowNumbers, actions: NDArray[Any]) -> StepResult:
        """Take one step. ContractViolation: the result does not consist of [n] finite numbers and flags."""
        result: StepResult = self._call("step", self.inner.step, rows, actions)
        check_form(result, len(rows), self.spec.metrics, self.spec.chunk)
        if not np.isfinite(result.reward).all():
            raise ContractViolation("step returned a reward of NaN or infinity", "check what the simulator returns")
        return result

    def observe(self, rows: RowNumbers) -> Arrays:
        """Observe the rows. ContractViolation: entries are not finite or unwritten, or `out` is rebound."""
        shapes = {name: ((len(rows), *array.shape), array.dtype) for name, array in self.spec.observation.items()}
        first, second = ({name: _filled(*shape, turn) for name, shape in shapes.items()} for turn in (0, 1))
        for out in (first, second):
            self._call("observe", self.inner.observe, rows, MappingProxyType(out))
        for name, array in first.items():
            unwritten = [seen == _filled(*shapes[name], turn) for turn, seen in enumerate((array, second[name]))]
            if np.logical_and(*unwritten).any():
                raise ContractViolation(
                    f"observe leaves entries of out[{name!r}] unwritten", f"write all of them: out[{name!r}][i] = …"
                )
            if not np.isfinite(array).all():
                raise ContractViolation(
                    f"observe wrote NaN or infinity to {name!r}", "check what the simulator returns"
                )
        return first

    def expert_actions(self, rows: RowNumbers) -> NDArray[Any] | None:
        """Actions of the scripted expert; None without one."""
        if not self.traits.expert:
            return None
        return np.asarray(self._call("expert", self.inner.expert_actions, rows))

    def discard(self, row: int) -> None:
        self._call("reset", self.inner.discard, row)

    @contextmanager
    def resetting(self, row: int, seed: int) -> Iterator[None]:
        """During this block a thread resets the row, and prepares its observation if the batch supports that."""
        errors: list[Exception] = []

        def reset() -> None:
            try:
                self.inner.reset([row], [0], [seed])
                if self.traits.prepares_observations:
                    self.inner.prepare_observation(row)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

        thread = threading.Thread(target=reset, name="reset ahead")
        thread.start()
        try:
            yield
        finally:
            self._call("reset", thread.join)
        if errors:
            raise ContractViolation(f"reset in a thread raised {errors[0]!r}", "leave the trait resets_ahead out")

    def close(self) -> None:
        self._call("close", self.inner.close)


def read_spec(settings: EnvSettings, about_to: Callable[[str], None]) -> EnvSpec:
    """The environment's spec. ContractViolation: spec() raises or returns another type."""
    spec = _call(about_to, "spec", settings.spec)
    if not isinstance(spec, EnvSpec):
        raise ContractViolation(f"spec returned {type(spec).__name__}", "return an EnvSpec")
    return spec


def _call(about_to: Callable[[str], None], call: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Announce and make a call into user code. An exception becomes a ContractViolation with the user's source line."""
    about_to(call)
    try:
        return function(*arguments)
    except PolyrhythmError:
        raise
    except (Exception, SystemExit) as raised:
        error = first_cause(raised) if isinstance(raised, Exception) else raised
        if isinstance(error, PolyrhythmError):
            raise error from raised
        violation = violation_of(call, error)
        if isinstance(error, ImportError):
            violation = ContractViolation(violation.problem, "install the missing package, or correct the import")
        elif "mappingproxy" in str(error):
            violation = ContractViolation(violation.problem, "`out` is read-only: write into it, out[name][:] = …")
        raise violation from error


def _filled(shape: tuple[int, ...], dtype: str, turn: int) -> NDArray[Any]:
    """An array of a value that is unlikely as an observation and differs by turn."""
    kind = np.dtype(dtype).kind
    return np.full(
        shape, -1.2345e4 * (turn + 1) if kind == "f" else bool(turn) if kind == "b" else (85, 42)[turn], dtype
    )


def as_utf8(text: str) -> str:
    """Replace lone surrogates, which no message can carry."""
    return text.encode(errors="replace").decode()


def check_form(result: object, rows: int, metrics: Collection[str], chunk: int = 0) -> None:
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


def trial_seed(number: int) -> int:
    """A 62-bit seed like those of training, so that an environment that accepts only smaller ones is found before the
    run."""
    return split_seed(mix(number), held_out=False)


#: Seed of the episode.
SEED = trial_seed(1)
#: Maximum number of expert messages; a longer episode is cut.
_MESSAGES = 8
#: Maximum tokens of a message without an expert: short, so that it overflows no context.
_WORDS = 4


class TrialEpisode(NamedTuple):
    """The sample, and a description of it."""

    sample: Trajectory
    said: str


def is_text(spec: EnvSpec) -> bool:
    """Whether actions are messages that answer a prompt of tokens."""
    return bool(spec.action.stops) and {"tokens", "length"} <= spec.observation.keys()


def play_episode(env: CheckedEnv, *, expert: bool) -> TrialEpisode:
    """Play a training episode of row 0 and the first task; the fields that a policy would add are 0.

    expert: use the expert's messages, if there is one; otherwise a single message of a few words of the prompt.
    ContractViolation, with the user's source line, or PolyrhythmError: the environment fails.
    """
    every = range(env.rows)
    env.reset(every, [0] * env.rows, [trial_seed(1 + row) for row in every])
    rows = [0] if env.spec.step_rows else list(every)
    seen, chosen, results, over = [env.observe(every)], [], list[StepResult](), False
    for _ in range(min(_MESSAGES, env.spec.max_steps)):
        found = None
        if expert:
            with suppress(ContractViolation, PolyrhythmError):  # which the recording of demonstrations reports
                found = env.expert_actions(rows)
        actions = _words_of_prompts(env, rows, seen[-1]) if found is None else found.astype(np.int64)
        chosen.append(actions[:1])
        results.append(env.step(rows, actions))
        seen.append(env.observe(every))
        over = bool(results[-1].terminated[0] or results[-1].truncated[0])
        if over or found is None:
            break
    count, by = len(results), "the prompt's own words" if found is None else "the expert"
    said = f"an episode of {count} message{'s' * (count > 1)}, answered by {by}{'' if over else ', cut there'}"
    return TrialEpisode(_sample(env, seen, np.concatenate(chosen), results), said)


def _words_of_prompts(env: CheckedEnv, rows: Sequence[int], seen: Arrays) -> NDArray[np.int64]:
    """The first tokens of each prompt as its answer: [n,C,1]."""
    stops = env.spec.action.stops
    message = np.full((len(rows), env.spec.chunk, 1), stops[0], np.int64)
    for place, row in enumerate(rows):
        own = [token for token in seen["tokens"][row, : seen["length"][row]] if token not in stops]
        own = own[: min(_WORDS, env.spec.chunk - 1)]
        message[place, : len(own), 0] = own
    return message


def _sample(
    env: CheckedEnv, seen: Sequence[Arrays], actions: NDArray[np.generic], results: Sequence[StepResult]
) -> Trajectory:
    steps, last = len(results), results[-1]
    valid = np.ones((steps, env.spec.chunk), bool)
    rewards = np.zeros((steps, env.spec.chunk), np.float32)
    for step, result in enumerate(results):
        if result.executed is not None:
            valid[step] = result.executed[0]
        rewards[step, int(valid[step].sum()) - 1] = result.reward[0]
    terminated = bool(last.terminated[0])
    return Trajectory(
        obs={name: np.stack([arrays[name][0] for arrays in seen]) for name in seen[0]},
        actions=actions,
        logprob=np.zeros(actions.shape, np.float32),
        value=np.zeros(steps, np.float32),
        forward_inputs={},
        rewards=rewards,
        valid=valid,
        version=np.zeros(steps, np.int64),
        terminated=terminated,
        truncated=not terminated,
        success=any(result.success[0] > 0 for result in results),
        env_steps=steps,
        ticket=0,
        group=0,
        task=0,
    )
