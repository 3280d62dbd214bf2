"""Wraps an env batch: measures the time spent in it and marks its exceptions as the environment's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation, own_place
from polyrhythm.envs.base import EnvBatch, RowNumbers, StepResult
from polyrhythm.envs.results import check_form
from polyrhythm.errors import PolyrhythmError, RunHalted

#: `Station.doing` between two units of work.
IDLE = ("", 0.0)


class EnvFault(Exception):
    """Error raised by the environment; the message names the call and the error. place: ` (file, line 12)` in the
    user's code, if the traceback passes through it."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class GuardedEnv:
    """Wrapper of env batch `inner`. seconds: time spent in it; doing: (call under way, its begin), ("", 0) if none.

    An exception becomes an EnvFault, except those that a retry cannot solve: PolyrhythmError and ImportError. A step's
    result is checked once for each number of rows: RunHalted if it does not match `StepResult`.
    """

    def __init__(self, inner: EnvBatch) -> None:
        self.spec, self.rows, self.seconds = inner.spec, inner.rows, 0.0
        self.doing = IDLE
        self.inner = inner
        self._seen: set[int] = set()

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._call("reset", self.inner.reset, rows, tasks, seeds)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        result: StepResult = self._call("step", self.inner.step, rows, actions)
        if len(rows) not in self._seen:
            try:
                check_form(result, len(rows), self.spec.metrics)
            except ContractViolation as violation:
                raise RunHalted(f"the environment's {violation}") from violation
            self._seen.add(len(rows))
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._call("observe", self.inner.observe, rows, out)

    def close(self) -> None:
        self.inner.close()

    def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.monotonic()
        self.doing = (what, begin)
        try:
            return function(*arguments)
        except (PolyrhythmError, ImportError):
            raise
        except Exception as error:
            raise EnvFault(f"{what}: {type(error).__name__}: {error}", own_place(error)) from error
        finally:
            self.doing = IDLE
            self.seconds += time.monotonic() - begin
