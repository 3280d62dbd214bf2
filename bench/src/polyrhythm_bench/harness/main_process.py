"""What the main process costs in a run of real processes: CPU, descriptors and sockets, over a window of some seconds.

start ─ warm-up, in chunk steps ─┬── seconds ──┬ end of the run
                                 A             B        A, B: the counters of all processes are read
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler import records
from polyrhythm_bench.harness import resources

#: More versions than any window lasts.
_ENDLESS = 1_000_000


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What one process holds: file descriptors, those of them that are sockets, and threads."""

    descriptors: int
    sockets: int
    threads: int


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of one turn, over `seconds`. CPU in seconds: of the main process, of its loop's thread alone, of all
    processes of the run, of everything else on the machine. batches: forward passes."""

    seconds: float
    chunk_steps: int
    batches: int
    main_cpu_s: float
    loop_cpu_s: float
    cpu_s: float
    others_cpu_s: float
    main: ProcessUsage
    simulator: ProcessUsage

    @property
    def main_us(self) -> float:
        """CPU microseconds of the main process per chunk step."""
        return 1e6 * self.main_cpu_s / self.chunk_steps


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment, all in seconds or counts since some beginning."""

    at: float
    chunk_steps: int
    batches: int
    main_cpu_s: float
    loop_cpu_s: float
    cpu_s: float
    machine_cpu_s: float


class MainProcessTimer(Observer):
    """Reads the counters after `warm_up` chunk steps and `seconds` later, then ends the run.

    The loop asks it between two events whether to stop, so that nothing is measured in the middle of one.
    """

    hears: ClassVar[tuple[type, ...]] = (*RunTotals.hears, records.RequestArrived, records.BatchDone)

    def __init__(self, pipeline: Pipeline, warm_up: int, seconds: float) -> None:
        assert pipeline.launcher.folder is not None, "the processes are told apart by their ids"
        self._loop, self._pids = pipeline.loop, process_ids(pipeline.launcher.hosting)
        self._warm_up, self._seconds = warm_up, seconds
        self._totals, self._chunk_steps, self._batches = RunTotals(), 0, 0
        self._begin: Reading | None = None
        self._until = math.inf

    def measure(self) -> Window:
        """Train until the time is over. RunHalted: a station was lost meanwhile."""
        self._loop.add_observers(self)
        self._loop.stop = self._is_over
        with suppress(Interrupted):
            self._loop.train_until(_ENDLESS)
        self._totals.refuse_faults()  # before processes are looked for that may be gone
        begin, end = self._begin, self._read()
        assert begin is not None
        cpu_s = end.cpu_s - begin.cpu_s
        return Window(
            seconds=end.at - begin.at,
            chunk_steps=end.chunk_steps - begin.chunk_steps,
            batches=end.batches - begin.batches,
            main_cpu_s=end.main_cpu_s - begin.main_cpu_s,
            loop_cpu_s=end.loop_cpu_s - begin.loop_cpu_s,
            cpu_s=cpu_s,
            others_cpu_s=max(0.0, end.machine_cpu_s - begin.machine_cpu_s - cpu_s),
            main=usage_of(os.getpid()),
            simulator=usage_of(self._pids["simulator-0"]),
        )

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self._totals.on_decision(now, event, commands)
        if isinstance(event, records.RequestArrived):
            self._chunk_steps += event.rows
        elif isinstance(event, records.BatchDone):
            self._batches += 1

    def _is_over(self) -> bool:
        if self._totals.faults:
            return True
        if self._begin is None and self._chunk_steps >= self._warm_up:
            self._begin = self._read()
            self._until = self._begin.at + self._seconds
        return time.monotonic() >= self._until

    def _read(self) -> Reading:
        own, stations = time.process_time(), _cpu_s(self._pids)
        return Reading(
            at=time.monotonic(),
            chunk_steps=self._chunk_steps,
            batches=self._batches,
            main_cpu_s=own,
            loop_cpu_s=time.thread_time(),
            cpu_s=own + stations,
            machine_cpu_s=resources.machine_cpu_s(),
        )


def _cpu_s(pids: Mapping[str, int]) -> float:
    return sum(resources.cpu_s_of(psutil.Process(pid)) for pid in pids.values())


def usage_of(pid: int) -> ProcessUsage:
    """What the process holds at this moment (Linux)."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.fspath(link.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    sockets = sum(link.startswith("socket:") for link in links)
    return ProcessUsage(len(links), sockets, psutil.Process(pid).num_threads())
