"""Wraps an env batch: measures the time spent in it and marks its exceptions as the environment's."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation, libraries, own_place
from polyrhythm.envs.base import (
    EnvBatch,
    EpisodeRefused,
    FullEnvBatch,
    RowNumbers,
    RowsFailed,
    StepResult,
    as_utf8,
    batch_traits,
    check_result,
    first_cause,
)
from polyrhythm.errors import PolyrhythmError, RunHalted
from polyrhythm.scheduler.records import DropReason

log = logging.getLogger(__name__)

#: `Station.doing` between two units of work.
IDLE = ("", 0.0)
#: Maximum UTF-8 bytes of an episode's texts that are sent: messages have a size limit.
MOST_BYTES = 2**15
#: Bytes that each text counts in addition to its own, which limits their number.
_TEXT_BYTES = 8


class EnvFault(Exception):
    """Error raised by the environment; the message names the call and the error.

    place: ` (file, line 12)` in the user's code, if the traceback passes through it, else the installed packages that
    raised it; refused: the environment does not play the episode (`EpisodeRefused`).
    """

    def __init__(self, message: str, place: str = "", *, refused: bool = False) -> None:
        super().__init__(message)
        self.place, self.refused = place, refused

    @property
    def reason(self) -> DropReason:
        return DropReason.EPISODE_REFUSED if self.refused else DropReason.ENVIRONMENT_RAISED


class GuardedEnv:
    """Wrapper of env batch `inner`. seconds: time spent in it; doing: (current call, its start), ("", 0) if none.

    async_steps: steps can be begun asynchronously. An exception becomes an EnvFault, except those that a retry cannot
    solve: PolyrhythmError and ImportError. A step's result is checked once for each number of rows: RunHalted if it
    does not match `StepResult`.

    Rows that fail individually (`RowsFailed`) are stored in `failed`, with their faults, and the call continues: in a
    step they end with a reward of NaN, and they are not observed. Handling a fault removes it.
    """

    def __init__(self, inner: EnvBatch) -> None:
        self.failed: dict[int, EnvFault] = {}
        self.spec, self.rows, self.seconds = inner.spec, inner.rows, 0.0
        self.doing = IDLE
        self.inner, self.traits = cast(FullEnvBatch, inner), batch_traits(inner)
        self.async_steps = bool(inner.spec.chunk) and self.traits.async_steps
        self._seen: set[int] = set()
        self._traced: set[tuple[str, type[Exception]]] = set()

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        for row in self.failed.keys() & set(map(int, rows)):
            del self.failed[row]
        try:
            self._call("reset", self.inner.reset, rows, tasks, seeds)
        except RowsFailed as failed:
            self._keep_faults("reset", failed, rows)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        try:
            result: StepResult = self._call("step", self.inner.step, rows, actions)
        except RowsFailed as failed:
            self._keep_faults("step", failed, rows)
            if failed.result is None:
                raise RunHalted("the environment's step raised RowsFailed without a result; give it one") from failed
            self._check(failed.result, len(rows))
            lost, found = np.isin(rows, list(failed.errors)), failed.result
            result = found._replace(
                reward=np.where(lost, np.nan, found.reward).astype(np.float32),
                terminated=found.terminated | lost,
                truncated=found.truncated & ~lost,
                success=np.where(lost, -1, found.success).astype(np.int8),
            )
        if len(rows) not in self._seen:
            self._check(result, len(rows))
            self._seen.add(len(rows))
        if self.spec.reports_success is False:
            result = result._replace(success=np.full(len(rows), -1, np.int8))
        return result

    def _check(self, result: StepResult, rows: int) -> None:
        try:
            check_result(result, rows, self.spec.metrics, self.spec.chunk)
        except ContractViolation as violation:
            raise RunHalted(f"the environment's {violation}") from violation

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        try:
            if not self.failed:
                self._call("observe", self.inner.observe, rows, out)
                return
            for place, row in enumerate(rows):
                if row not in self.failed:
                    part = {name: array[place : place + 1] for name, array in out.items()}
                    self._call("observe", self.inner.observe, [row], part)
        except RowsFailed as failed:
            raise _fault("observe", first_cause(failed)) from failed

    def observe_on_device(self, rows: RowNumbers) -> Mapping[str, Any]:
        """Tensors [n, ...] on the device. A row that has failed shows what another one does; {} if all have."""
        kept = [place for place, row in enumerate(rows) if int(row) not in self.failed]
        if not kept:
            return {}
        try:
            seen: Mapping[str, Any] = self._call(
                "observe", self.inner.observe_on_device, np.asarray(rows, np.intp)[kept]
            )
        except RowsFailed as failed:
            raise _fault("observe", first_cause(failed)) from failed
        if len(kept) == len(rows):
            return seen
        at = [kept.index(place) if place in kept else 0 for place in range(len(rows))]
        return {name: tensor[at] for name, tensor in seen.items()}

    def _keep_faults(self, call: str, failed: RowsFailed, rows: RowNumbers) -> None:
        """Store the faults of rows. RunHalted: the rows are not of the call."""
        if not failed.errors or not failed.errors.keys() <= set(map(int, rows)):
            names = list(failed.errors)
            raise RunHalted(
                f"the environment's {call} raised RowsFailed for the rows {names}; name one or more of {list(rows)}"
            ) from failed
        if isinstance(first_cause(failed), PolyrhythmError | ImportError):
            raise first_cause(failed)
        faults = {row: _fault(call, error) for row, error in failed.errors.items()}
        for row, fault in faults.items():
            kind = call, type(failed.errors[row])
            if kind not in self._traced and not fault.refused:
                self._traced.add(kind)
                log.error("row %d: %s; like errors come without a traceback", row, fault, exc_info=failed.errors[row])
        self.failed |= faults

    def take_failed(self, rows: RowNumbers) -> dict[int, EnvFault]:
        """Remove all stored faults; returns those of the given rows."""
        found = {row: fault for row in map(int, rows) if (fault := self.failed.get(row)) is not None}
        self.failed.clear()
        return found

    def discard(self, row: int) -> None:
        """Have the environment rebuild the row at its next reset, if it can: its numbers were not finite."""
        if self.traits.discards_rows:
            try:
                self._call("discard", self.inner.discard, row)
            except EnvFault as fault:
                log.warning("row %d: %s%s", row, fault, fault.place)

    def begin_step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> None:
        self._call("step", self.inner.begin_step, rows, actions)

    def drop_step(self, rows: RowNumbers) -> None:
        """Have the environment abandon steps that were begun."""
        try:
            self._call("step", self.inner.drop_step, rows)
        except EnvFault as fault:
            log.warning("rows %s: drop_%s%s", list(rows), fault, fault.place)

    def texts(self, row: int) -> tuple[str, ...]:
        """The row's conversation, cut at `MOST_BYTES`; () if the environment has no texts."""
        if not self.traits.texts:
            return ()
        try:
            return _within(self._call("texts", lambda: list(map(as_utf8, self.inner.texts(row)))), MOST_BYTES)
        except EnvFault as fault:
            log.warning("row %d: %s%s", row, fault, fault.place)
            return ()

    def close(self) -> None:
        self.inner.close()

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.monotonic()
        self.doing = (what, begin)
        try:
            return function(*arguments)
        except (PolyrhythmError, ImportError, RowsFailed):
            raise
        except Exception as error:
            raise _fault(what, error) from error
        finally:
            self.doing = IDLE
            self.seconds += time.monotonic() - begin


def _fault(call: str, error: Exception) -> EnvFault:
    if isinstance(error, EpisodeRefused):
        return EnvFault(str(error), refused=True)
    within = libraries(error)
    return EnvFault(f"{call}: {type(error).__name__}: {error}", f" (in {within})" if within else own_place(error))


def _within(texts: Sequence[str], most: int) -> tuple[str, ...]:
    """The texts cut to `most` bytes, with the number of characters cut."""
    kept: list[str] = []
    for place, text in enumerate(texts):
        content = text.encode()
        if len(content) > most:
            first = content[:most].decode(errors="ignore")
            more = sum(map(len, texts[place:])) - len(first)
            return (*kept, f"{first}… ({more:,} more characters)")
        kept.append(text)
        most -= len(content) + _TEXT_BYTES
    return tuple(kept)
