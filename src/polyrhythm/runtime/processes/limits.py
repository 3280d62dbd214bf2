"""What a run's processes need of this machine's limits on files and threads, checked before any of them starts.

Descriptors do not depend on the number of env batches: a process has one inbox, whatever its parts. Main has a line to
and from each station, a generator one to each simulator. Threads do: each env batch is stepped by a thread of its own,
so that environments that wait, or that compute outside Python, do so side by side.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.errors import StartError
from polyrhythm.runtime.transport.sockets import raise_file_limit

#: Descriptors of a process: those that Python, its packages and ZeroMQ open; and for each line to another process
#: (measured: 3 in main, 2 in a generator).
_OWN_FILES, _LINE_FILES = 64, 4
#: Threads of a process beside its parts: its main thread, two of ZeroMQ's, the inbox's, the authentication's.
_OWN_THREADS = 5
#: The same of a host's agent that nobody asks yet, with the shell that cleans up after it and its `cat`; each is one.
AGENT_THREADS = 7
#: Of a Ray of the run's own on two cores, rounded down: in main and in Ray's servers (170 measured), and in each actor
#: (27 measured).
_RAY_THREADS, _ACTOR_THREADS = 160, 20


def threads_of(parts: Sequence[int], *, agents: int = 0, actors: int = 0) -> int:
    """How many threads the processes of a run have here. parts: of each station process; agents: of hosts; actors: of a
    Ray of the run's own, 0 if it has none."""
    ray = _RAY_THREADS + _ACTOR_THREADS * actors if actors else 0
    return sum(parts) + _OWN_THREADS * (len(parts) + 1) + AGENT_THREADS * agents + ray


def check_limits(parts: Sequence[int], *, agents: int = 0, actors: int = 0) -> None:
    """Raise StartError unless station processes of so many parts each, in all, and what `threads_of` counts beside them
    can be started."""
    files = _OWN_FILES + _LINE_FILES * len(parts)
    allowed = raise_file_limit()
    if files > allowed:
        raise StartError(
            f"rollout.simulators, rollout.generators: {len(parts)} station processes need {files} file descriptors "
            f"in the main process, {allowed} are allowed; raise the limit (ulimit -n {files}), or use fewer simulators "
            "with more env batches each"
        )
    threads = threads_of(parts, agents=agents, actors=actors)
    left = min(_user_threads(), cgroup_threads(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup")))
    if threads > left:
        of_ray = threads - threads_of(parts, agents=agents)
        each = "one for each env batch, five for each process" + f", {of_ray} for Ray" * bool(actors)
        raise StartError(
            f"rollout.env_batches: the run needs {threads} threads ({each}), {left:.0f} can be started; raise the "
            "limit (ulimit -u, or pids.max of the container), or use fewer env batches of more rows"
        )


def _user_threads() -> float:
    """How many threads this user may have; root has no limit."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return math.inf if allowed == resource.RLIM_INFINITY or os.geteuid() == 0 else allowed


def cgroup_threads(own: str, root: Path) -> float:
    """How many threads can still be started in the control group of this process. own: `/proc/self/cgroup`; root: where
    control groups are mounted."""
    left = math.inf
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            folder = root / controllers / path.lstrip("/")
            left = min(left, _left_in(folder))
    return left


def _left_in(folder: Path) -> float:
    try:
        most, used = (folder / "pids.max").read_text().strip(), (folder / "pids.current").read_text()
    except OSError:  # no such controller, or not for us to see
        return math.inf
    return math.inf if most == "max" else max(0, int(most) - int(used))
