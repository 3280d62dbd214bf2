"""Cost of one version in a run of real processes: seconds, CPU seconds by process, busy time by station.

A run starts, trains some versions, and ends. Version k is counted from the publication of k-1 to its own. The first
ones are not counted: models are built, and overlapping stations have nothing to overlap with yet. Nor are those after
the last timed one, where rollout has stopped:

    version 1 │ 2 │ 3 … versions + 2 │ as many as the lag allows
              A   ├───── timed ──────┤
                                     B            A, B: the counters of processes and stations are read

Reading the counters asks every station, which takes as long as the longest unit of work; at A a version that is not
timed pays for it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar

import psutil

from polyrhythm.config.schema import RunConfig
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.running import running

#: The version whose publication begins what is timed.
_FIRST = 2


@dataclass(frozen=True, slots=True)
class VersionCost:
    """Means over the versions of one run.

    seconds_per_version, transitions_per_s, transitions_per_version (env steps of samples that ended), lag_mean (of the
    samples lent, in versions): of the versions that are timed. cores_busy: CPU seconds per second of all processes of
    the run; others_cores: of everything else on the machine; cpu_s_by: the run's CPU seconds per version by station,
    the conductor's process as `main`; busy: share of the time in which a station had work at hand, whether or not it
    had a core for it, 0..1; tokens_per_s: of answers that ended, where generators serve by streams, else 0.
    """

    seconds_per_version: float
    transitions_per_s: float
    transitions_per_version: float
    lag_mean: float
    cores_busy: float
    others_cores: float
    cpu_s_by: Mapping[str, float]
    busy: Mapping[str, float]
    tokens_per_s: float = 0.0

    @property
    def cpu_s_per_version(self) -> float:
        """CPU seconds of all processes together."""
        return sum(self.cpu_s_by.values())

    @property
    def cpu_ms_per_transition(self) -> float:
        """CPU milliseconds of all processes together for one env step of one row."""
        return 1e3 * self.cpu_s_per_version / self.transitions_per_version

    @property
    def main_us_per_transition(self) -> float:
        """CPU microseconds of the main process for the same; per chunk step where chunks have one action."""
        return 1e6 * self.cpu_s_by["main"] / self.transitions_per_version


@dataclass(frozen=True, slots=True)
class Mark:
    """A version is published: when, in seconds, and the env steps of all samples that had ended by then."""

    version: int
    at: float
    transitions: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters when a version was published: `at` in seconds, a moment later; CPU seconds of the machine and by process
    of the run; busy seconds by station; tokens that all generators have answered."""

    version: int
    at: float
    machine_cpu_s: float
    cpu_s: Mapping[str, float]
    busy_s: Mapping[str, float]
    tokens: float = 0.0


def measure(config: RunConfig, versions: int, *, validated: bool = True) -> VersionCost:
    """Run the configuration from its start (launcher local) for as long as it takes to time so many versions.

    validated: as in `running`; False also for stations that sleep, which would sleep through the validation's answers.
    Errors are those of `check` and `build_pipeline`; RunHalted: a station was lost, so the time says nothing.
    """
    assert config.launcher == "local", "one process has no stations to tell apart"
    last = _FIRST + versions
    with running(config, validated=validated) as pipeline:
        timer = VersionTimer(pipeline.launcher, (_FIRST - 1, last))
        pipeline.loop.add_observers(timer)
        pipeline.loop.train_until(last + math.ceil(config.freshness.max_lag))
    timer.totals.refuse_faults()
    return timer.cost(_FIRST, last)


class VersionTimer(Observer):
    """An observer: marks of all versions, lags of all samples lent, readings at the two versions `read_at`."""

    hears: ClassVar[tuple[type, ...]] = (*RunTotals.hears, records.Published, records.StartUpdate)

    def __init__(self, launcher: Launcher, read_at: tuple[int, int]) -> None:
        assert launcher.folder is not None, "the processes are told apart by their ids"
        self.totals = RunTotals()
        self._launcher, self._read_at = launcher, read_at
        self._marks: dict[int, Mark] = {}
        self._lags: list[tuple[int, int]] = []
        self._readings: dict[int, Reading] = {}

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self.totals.on_decision(now, event, commands)
        for command in commands:
            if isinstance(command, records.StartUpdate):
                self._lags += [(command.version, command.version - oldest) for oldest in command.oldest]
        if isinstance(event, records.Published):
            self._marks[event.version] = Mark(event.version, now, self.totals.transitions)
            if event.version in self._read_at:
                self._readings[event.version] = self._read(event.version)

    def _read(self, version: int) -> Reading:
        statistics = self._launcher.hosting.statistics(fresh=True)
        busy_s = {name: counts.get("busy_s", 0.0) for name, counts in statistics.items()}
        tokens = sum(counts.get("tokens", 0.0) for counts in statistics.values())
        pids = {**process_ids(self._launcher.hosting), "main": os.getpid()}
        cpu_s = {name: resources.cpu_s_of(psutil.Process(pid)) for name, pid in pids.items()}
        return Reading(version, time.monotonic(), resources.machine_cpu_s(), cpu_s, busy_s, tokens)

    def cost(self, first: int, last: int) -> VersionCost:
        """From the publication of version `first` to that of `last`."""
        lag_mean = fmean(lag for version, lag in self._lags if first <= version < last)
        before, after = (self._readings[version] for version in self._read_at)
        return cost(self._marks[first], self._marks[last], lag_mean, before, after)


def cost(begin: Mark, end: Mark, lag_mean: float, before: Reading, after: Reading) -> VersionCost:
    """The cost of a version: time between two marks, CPU and busy time between two readings."""
    versions, seconds, transitions = end.version - begin.version, end.at - begin.at, end.transitions - begin.transitions
    read, wall_s = after.version - before.version, after.at - before.at
    cpu_s = {name: spent - before.cpu_s[name] for name, spent in after.cpu_s.items()}
    own = sum(cpu_s.values())
    others = after.machine_cpu_s - before.machine_cpu_s - own
    return VersionCost(
        seconds_per_version=seconds / versions,
        transitions_per_s=transitions / seconds,
        transitions_per_version=transitions / versions,
        lag_mean=lag_mean,
        cores_busy=own / wall_s,
        others_cores=max(0.0, others / wall_s),
        cpu_s_by={name: spent / read for name, spent in cpu_s.items()},
        busy={name: min(1.0, (busy - before.busy_s[name]) / wall_s) for name, busy in after.busy_s.items()},
        tokens_per_s=(after.tokens - before.tokens) / wall_s,
    )
