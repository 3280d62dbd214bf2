"""How many chunk steps per second the main process can direct: null stations in real processes.

Env batches of one row whose steps cost nothing, dealt over simulator processes, a generator whose passes cost nothing
and a trainer that trains one parameter: what is left is our own work. The loop, conductor, launcher, sockets and
tickets are those of a run of `polyrhythm train`; its metrics, trace and checkpoints are left out.

Every station is always busy, so main's CPU per chunk step is that of a loaded main process. On few cores the stations
take most of them; what main could direct if they did not is 1 / (CPU of its loop per chunk step).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import zmq

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.pipeline.build import Pipeline
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.runtime.local import LocalLauncher
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.running import running

log = logging.getLogger(__name__)

ENV_BATCHES, PROCESSES = (16, 64, 256, 1024, 2048, 4096), (2, 8)
#: CPU microseconds of the main process per chunk step that are aimed at, and at which size.
LIMIT_US, LIMIT_ENV_BATCHES, LIMIT_PROCESSES = 40.0, 2048, 8
#: Chunk steps of each env batch before what is measured, and env steps of the longest episode.
_WARM_UP_STEPS, _EPISODE_STEPS = 4, 50
_ZMQ_SOCKETS = zmq.Context.instance().get(zmq.MAX_SOCKETS)
_TOO_MANY = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


def run(
    env_batches: Sequence[int] = ENV_BATCHES, processes: Sequence[int] = PROCESSES, seconds: float = 5.0,
    repeats: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """Every number of env batches in every number of simulator processes, `repeats` interleaved turns of `seconds`.

    Returns `us_per_chunk_step` of the main process by number of env batches, in the most processes; `saturates_at`,
    chunk steps per second at which its loop would be busy all the time, likewise; `descriptor_limit` of a process;
    `within_limit` if its size is among those measured; and `sizes`, one entry for each pair (see `summarise`).
    ConfigError: the env batches cannot be dealt evenly.
    """
    for count in env_batches:
        for simulators in processes:
            if count % simulators:
                raise ConfigError(f"--env-batches {count}: not a multiple of {simulators} processes; make it one")
    sizes = [(count, simulators) for simulators in sorted(processes) for count in sorted(env_batches)]
    turns: dict[tuple[int, int], list[Window]] = {size: [] for size in sizes}
    refused: dict[tuple[int, int], str] = {}
    for turn in range(repeats):
        for size in sizes:
            if size in refused:
                continue
            try:
                turns[size].append(measure(*size, seconds, turn))
            except (OSError, zmq.ZMQError, RuntimeError, PolyrhythmError) as error:
                if not is_limit(error):
                    raise
                refused[size] = _refusal(error)
            log.info("turn %d, %d env batches in %d processes: %s", turn + 1, *size, turns[size][-1:] or refused[size])
    found = [summarise(size, turns[size], refused.get(size, "")) for size in sizes]
    measured = {entry["env_batches"]: entry for entry in found if entry["processes"] == max(processes)}
    goal = next((e for e in found if (e["env_batches"], e["processes"]) == (LIMIT_ENV_BATCHES, LIMIT_PROCESSES)), {})
    us = goal.get("us_per_chunk_step")
    return {
        "us_per_chunk_step": {str(count): entry.get("us_per_chunk_step") for count, entry in measured.items()},
        "saturates_at": {str(count): entry.get("saturates_at") for count, entry in measured.items()},
        "limit_us": LIMIT_US,
        "within_limit": None if not goal else us is not None and us <= LIMIT_US,
        "descriptor_limit": _descriptor_limit(),
        "seconds": seconds,
        "repeats": repeats,
        "sizes": found,
    }


@dataclass(frozen=True, slots=True)
class Usage:
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
    main: Usage
    simulator: Usage


def summarise(size: tuple[int, int], windows: Sequence[Window], refused: str) -> dict[str, Any]:
    """One entry of the result: medians over the windows; or why there are none, in `not_measured`.

    us_per_chunk_step: CPU of the main process; loop_us: of its loop, without ZeroMQ's threads; saturates_at: chunk
    steps per second at which the loop alone fills a core; chunk_steps_per_s: as reached beside all stations; main_busy:
    share of a core; cpu_ms_per_transition: of all processes (a chunk step here is one transition); rows_per_batch;
    others_cores: taken by everything else on the machine; descriptors, sockets and threads of main and of a simulator.
    """
    entry: dict[str, Any] = {"env_batches": size[0], "processes": size[1]}
    if not windows:
        return {**entry, "not_measured": refused}
    us = [1e6 * w.main_cpu_s / w.chunk_steps for w in windows]
    loop_us = median(1e6 * w.loop_cpu_s / w.chunk_steps for w in windows)
    last = windows[-1]
    return {
        **entry,
        "us_per_chunk_step": median(us),
        "loop_us": loop_us,
        "saturates_at": 1e6 / loop_us,
        "chunk_steps_per_s": median(w.chunk_steps / w.seconds for w in windows),
        "main_busy": median(w.main_cpu_s / w.seconds for w in windows),
        "cpu_ms_per_transition": median(1e3 * w.cpu_s / w.chunk_steps for w in windows),
        "rows_per_batch": median(w.chunk_steps / max(1, w.batches) for w in windows),
        "others_cores": median(w.others_cpu_s / w.seconds for w in windows),
        "descriptors_main": last.main.descriptors,
        "sockets_main": last.main.sockets,
        "threads_main": last.main.threads,
        "descriptors_simulator": last.simulator.descriptors,
        "sockets_simulator": last.simulator.sockets,
        "threads_simulator": last.simulator.threads,
        "us_by_turn": us,
    }


def config(env_batches: int, simulators: int, seed: int = 0) -> RunConfig:
    """A batch as soon as a generator is free; an update takes as many samples as there are rows."""
    here = "polyrhythm_bench.workloads"
    return validate(
        {
            "name": "ceiling",
            "seed": seed,
            "env": {"type": f"{here}.null_env:NullEnvSettings", "episode_steps": _EPISODE_STEPS},
            "policy": {"type": f"{here}.null_policy:NullSettings"},
            "rollout": {"simulators": simulators, "env_batches": env_batches // simulators, "rows": 1},
            "batching": {"type": "dynamic", "max_rows": 256, "max_wait_ms": 0.0},
            "freshness": {"max_lag": 2.0, "on_update": "continue"},
            "training": {"versions": 1_000_000, "mini_batch_samples": env_batches},
            "algorithm": {"proximal": "behavior"},
        }
    )


def measure(env_batches: int, simulators: int, seconds: float, seed: int = 0) -> Window:
    """One turn. Errors are those of `running`; RunHalted: a station was lost."""
    with running(config(env_batches, simulators, seed), validated=False) as pipeline:
        stopwatch = Stopwatch(pipeline, _WARM_UP_STEPS * env_batches, seconds)
        return stopwatch.measure()


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


class Stopwatch:
    """Reads the counters after `warm_up` chunk steps and `seconds` later, then ends the run.

    The loop asks it between two events whether to stop, so that nothing is measured in the middle of one.
    """

    def __init__(self, pipeline: Pipeline, warm_up: int, seconds: float) -> None:
        assert isinstance(pipeline.launcher, LocalLauncher), "the processes are told apart by their ids"
        self._loop, self._pids = pipeline.loop, pipeline.launcher.processes()
        self._warm_up, self._seconds = warm_up, seconds
        self._totals, self._chunk_steps, self._batches = RunTotals(), 0, 0
        self._begin: Reading | None = None
        self._until = math.inf

    def measure(self) -> Window:
        """Train until the time is over. RunHalted: a station was lost meanwhile."""
        self._loop.observers.append(self)
        self._loop.stop = self._is_over
        try:
            self._loop.train_until(1_000_000)
        except Interrupted:
            pass
        self._totals.refuse_faults()
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
            main=usage(os.getpid()),
            simulator=usage(self._pids["simulator-0"]),
        )

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        self._totals.on_decision(now, event, commands)
        if isinstance(event, records.RequestArrived):
            self._chunk_steps += event.rows
        elif isinstance(event, records.BatchDone):
            self._batches += 1

    def on_report(self, now: float, report: Report) -> None:
        pass

    def _is_over(self) -> bool:
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


def usage(pid: int) -> Usage:
    """What the process holds at this moment (Linux)."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(link))
        except FileNotFoundError:  # closed meanwhile
            continue
    return Usage(len(links), sum(link.startswith("socket:") for link in links), psutil.Process(pid).num_threads())


def _descriptor_limit() -> int:
    """File descriptors that a process of this user may have open (`ulimit -n`)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _refusal(error: BaseException) -> str:
    """Why a size was not measured, in one line."""
    found = re.search(r"Too many open files|can't start new thread", str(error))
    what = found[0] if found else str(error)
    return f"{what}: at most {_descriptor_limit():,} descriptors a process, {_ZMQ_SOCKETS:,} sockets a ZeroMQ context"


def is_limit(error: BaseException) -> bool:
    """Whether a limit on descriptors, sockets or threads was reached, here or in a station that says so."""
    if getattr(error, "errno", None) in _TOO_MANY:
        return True
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    return "Too many open files" in text or "can't start new thread" in text
