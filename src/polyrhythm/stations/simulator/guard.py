"""An env batch whose time is measured and whose errors can be told from ours."""

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

#: What `Station.doing` gives between two units of work.
IDLE = ("", 0.0)


class EnvFault(Exception):
    """The environment raised; the message says in which call and what. place: ` (file, line 12)` in the user's own
    code, where it passed there."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class GuardedEnv:
    """The env batch `inner`. seconds: time spent in it so far; doing: the call under way and since when, ("", 0): none.

    What it raises comes out as an EnvFault, but for what no other attempt would mend: a PolyrhythmError, which is the
    user's to solve, and a missing package. A step's result is looked at once for each number of rows: RunHalted if it
    is not what `StepResult` says.
    """

    def __init__(self, inner: EnvBatch) -> None:
        self.spec, self.rows, self.seconds = inner.spec, inner.rows, 0.0
        self.doing = IDLE
        self._inner = inner
        self._seen: set[int] = set()

    def reset(self, rows: RowNumbers, tasks: Sequence[int], seeds: Sequence[int]) -> None:
        self._call("reset", self._inner.reset, rows, tasks, seeds)

    def step(self, rows: RowNumbers, actions: NDArray[np.generic]) -> StepResult:
        result: StepResult = self._call("step", self._inner.step, rows, actions)
        if len(rows) not in self._seen:
            try:
                check_form(result, len(rows), self.spec.metrics)
            except ContractViolation as violation:
                raise RunHalted(f"the environment's {violation}") from violation
            self._seen.add(len(rows))
        return result

    def observe(self, rows: RowNumbers, out: Mapping[str, NDArray[np.generic]]) -> None:
        self._call("observe", self._inner.observe, rows, out)

    def close(self) -> None:
        self._inner.close()

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
