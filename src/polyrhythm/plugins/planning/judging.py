"""Judges many placements: in this process while they are quick, then in a fork of it on each core.

A fork shares the memory of what this process has imported, so it is there in milliseconds. A process that has other
threads, which a fork would lack, judges alone. Invariant: predictions depend neither on the number of processes nor on
the order in which they come.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from polyrhythm.config.schema import RunConfig
from polyrhythm.imports import count_cores
from polyrhythm.plugins.planning.judge import Length, Prediction, predict
from polyrhythm.plugins.planning.profile import Profile
from polyrhythm.runtime.devices import Devices
from polyrhythm.runtime.processes.child import die_with
from polyrhythm.specs import EnvSpec

#: Seconds that one placement takes from which on other processes help.
_LONG_S = 0.2
#: Processes at most.
_MOST = 32


@dataclass(frozen=True, slots=True)
class Case:
    """A placement to judge: `predict`'s arguments."""

    profile: Profile
    config: RunConfig
    devices: Devices
    spec: EnvSpec
    length: Length

    def predict(self) -> Prediction:
        return predict(self.profile, self.config, self.devices, spec=self.spec, length=self.length)


def forkable_cores() -> int:
    """Cores of this process, at most `_MOST`; 1 if it has other threads."""
    threads = Path("/proc/self/task")
    alone = threads.is_dir() and len(list(threads.iterdir())) == 1
    return min(_MOST, count_cores()) if alone else 1


def _become(parent: int) -> None:
    """Of a fork: end with the parent, and when the pool terminates it, as it does once another one was killed."""
    die_with(parent)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Judges:
    """A context. processes: at most; long_s: of a placement, from which on there are several; told: called with each
    prediction, in any order."""

    def __init__(
        self, processes: int = 1, told: Callable[[Prediction], None] | None = None, *, long_s: float = _LONG_S
    ) -> None:
        self._processes, self._told, self._long_s = processes, told, long_s
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()  # so that collections of a simulation's objects pass over all that was imported
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        gc.unfreeze()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def predict(self, cases: Sequence[Case]) -> list[Prediction]:
        """In the order of the cases. ConfigError: from `predict`."""
        found: dict[int, Prediction] = {}
        for number, case in enumerate(cases):
            if self._pool is not None:
                break
            began = time.perf_counter()
            found[number] = case.predict()
            self._tell(found[number])
            if self._processes > 1 and time.perf_counter() - began >= self._long_s:
                context = multiprocessing.get_context("fork")
                self._pool = ProcessPoolExecutor(self._processes, context, _become, (os.getpid(),))
        rest = {number: case for number, case in enumerate(cases) if number not in found}
        if self._pool is not None and rest:
            try:
                self._in_processes(self._pool, rest, found)
            except BrokenProcessPool:  # one was killed, such as for its memory
                self._close()
                self._processes = 1
                rest = {number: case for number, case in rest.items() if number not in found}
                found |= dict(zip(rest, self.predict(list(rest.values())), strict=True))
        return [found[number] for number in range(len(cases))]

    def _in_processes(self, pool: ProcessPoolExecutor, cases: dict[int, Case], found: dict[int, Prediction]) -> None:
        numbers: dict[Future[Prediction], int] = {pool.submit(case.predict): n for n, case in cases.items()}
        waiting = set(numbers)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in done:
                found[numbers[one]] = one.result()
                self._tell(found[numbers[one]])

    def _tell(self, one: Prediction) -> None:
        if self._told is not None:
            self._told(one)
