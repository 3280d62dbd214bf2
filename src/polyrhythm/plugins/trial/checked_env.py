"""Wraps an environment to announce its calls and check the form of their results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

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
    check_result,
    first_cause,
    traits_of,
)
from polyrhythm.errors import PolyrhythmError
from polyrhythm.specs import EnvSpec

#: Maximum number of seeds tried for an episode, since some may be refused.
_SEEDS = 32

Arrays = dict[str, NDArray[Any]]


class CheckedEnv:
    """The env batch of `settings`, with `rows` rows. about_to: called with the name of each call before it begins.

    steps: of each row since its reset; stepped, reports: number of all steps, and of those that reported success.
    """

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
        self.steps, self.stepped, self.reports = dict.fromkeys(range(rows), 0), 0, 0

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin episodes; for refused ones (`EpisodeRefused`) the next seeds are tried."""
        self.steps |= dict.fromkeys(map(int, rows), 0)
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
        check_result(result, len(rows), self.spec.metrics, self.spec.chunk)
        for row in map(int, rows):
            self.steps[row] += 1
        if not (finite := np.isfinite(result.reward)).all():
            raise self._not_finite(rows, actions, result, int(np.argmin(finite)))
        self.stepped += 1
        self.reports += bool((result.success.astype(np.int8) >= 0).any())
        return result

    def _not_finite(
        self, rows: RowNumbers, actions: NDArray[Any], result: StepResult, place: int
    ) -> ContractViolation:
        """The violation of the row at this place. Its cause is the same for all rows, steps and actions."""
        row, fix = int(rows[place]), "check what the simulator returns"
        action = np.array2string(np.asarray(actions[place]), precision=3, separator=", ", threshold=8, edgeitems=4)
        at = f"{result.reward[place]} at step {self.steps[row]} of row {row}, for the action {' '.join(action.split())}"
        violation = ContractViolation(f"step returned a reward of NaN or infinity: {at}{_id_of(self.settings)}", fix)
        violation.__cause__ = ContractViolation("step returned a reward of NaN or infinity", fix)
        return violation

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

    def observe_on_device(self, rows: RowNumbers) -> Arrays:
        """What the device shows of the rows, copied to the host."""
        seen = self._call("observe", self.inner.observe_on_device, rows)
        return {name: tensor.detach().cpu().numpy() for name, tensor in seen.items()}

    def leave_device(self) -> None:
        """Leave the device and come back."""
        self._call("suspend", self.inner.suspend)
        self._call("resume", self.inner.resume)

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


def _id_of(settings: EnvSettings) -> str:
    """` (env.id = Line-v0)`, "" for settings without an id."""
    name = getattr(settings, "id", "")
    return f" (env.id = {name})" if name else ""


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
