"""How many chunk steps per second the main process can direct: null stations in real processes.

Env batches of one row whose steps cost nothing, dealt over simulator processes, a generator whose passes cost nothing
and a trainer that trains one parameter: what is left is our own work. The loop, conductor, launcher, sockets and
tickets are those of a run of `polyrhythm train`; its metrics, trace and checkpoints are left out.

Every station is always busy, so main's CPU per chunk step is that of a loaded main process. On few cores the stations
take most of them; what main could direct if they did not is 1 / (CPU of its loop per chunk step).
"""

from __future__ import annotations

import errno
import gc
import logging
import re
import resource
from collections.abc import Sequence
from statistics import median
from typing import Any

import zmq

from polyrhythm.config.load import validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError, PolyrhythmError, RunHalted
from polyrhythm_bench.harness.main_process import MainProcessTimer, Window
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
            if size in refused and not turns[size]:
                continue  # it would fail again
            try:
                window = measure(*size, seconds, turn)
                turns[size].append(window)
                said = f"{window.main_us:.1f} us per chunk step"
            except (OSError, zmq.ZMQError, RuntimeError, PolyrhythmError) as error:
                said = refused[size] = reason_of(error)
            log.info("turn %d, %d env batches in %d processes: %s", turn + 1, *size, said)
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


def summarise(size: tuple[int, int], windows: Sequence[Window], refused: str) -> dict[str, Any]:
    """One entry of the result: medians over the windows. not_measured: why turns are missing, or all of them.

    us_per_chunk_step: CPU of the main process; loop_us: of its loop, without ZeroMQ's threads; saturates_at: chunk
    steps per second at which the loop alone fills a core; chunk_steps_per_s: as reached beside all stations; main_busy:
    share of a core; cpu_ms_per_transition: of all processes (a chunk step here is one transition); rows_per_batch;
    others_cores: taken by everything else on the machine; descriptors, sockets and threads of main and of a simulator.
    """
    entry: dict[str, Any] = {"env_batches": size[0], "processes": size[1]}
    if not windows:
        return {**entry, "not_measured": refused}
    us = [window.main_us for window in windows]
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
        **({"not_measured": refused} if refused else {}),
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
            "training": {"versions": 1_000_000, "mini_batch_samples": env_batches, "epochs": 1, "minibatch_steps": 0},
            "algorithm": {"proximal": "behavior"},
            # Thousands of threads on few cores: a late heartbeat is not a lost station here.
            "supervision": {"heartbeat_s": 120.0},
        }
    )


def measure(env_batches: int, simulators: int, seconds: float, seed: int = 0) -> Window:
    """One turn. Errors are those of `running`; RunHalted: a station was lost."""
    gc.collect()  # the turn before has left memory that only the collector finds, and descriptors with it
    with running(config(env_batches, simulators, seed), validated=False) as pipeline:
        return MainProcessTimer(pipeline, _WARM_UP_STEPS * env_batches, seconds).measure()


def _descriptor_limit() -> int:
    """File descriptors that a process of this user may have open (`ulimit -n`)."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def reason_of(error: BaseException) -> str:
    """Why a turn was not measured, in one line. Raises the error again if neither a limit of the machine nor a lost
    station is the reason."""
    if is_limit(error):
        found = re.search(r"Too many open files|can't start new thread", str(error))
        what = found[0] if found else str(error)
        limit = f"{_descriptor_limit():,} descriptors a process, {_ZMQ_SOCKETS:,} sockets a ZeroMQ context"
        return f"{what}: at most {limit}"
    if isinstance(error, RunHalted):
        return str(error)
    raise error


def is_limit(error: BaseException) -> bool:
    """Whether a limit on descriptors, sockets or threads was reached, here or in a station that says so."""
    if getattr(error, "errno", None) in _TOO_MANY:
        return True
    text = " ".join([str(error), *getattr(error, "__notes__", ())])
    return "Too many open files" in text or "can't start new thread" in text
