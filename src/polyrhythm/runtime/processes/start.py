"""Starts the process of a station on this machine, after a check of the machine's limits on files and threads.

Descriptors do not depend on the number of env batches: a process has one inbox, whatever its parts. Main has a line to
and from each station, a generator one to each simulator. Threads do: each env batch is stepped by a thread of its own,
so that environments that wait, or that compute outside Python, do so side by side.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

import msgspec

from polyrhythm.errors import StartError
from polyrhythm.imports import same_imports
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import rank_name
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.transport.sockets import raise_file_limit


class ProcessHandle(Protocol):
    """A started process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int:
        """Its process id; 0 while that is not known."""

    def poll(self) -> int | None:
        """Its exit status, once it has been reaped."""

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


#: Starts the process of a spec, which logs to the file.
Spawn = Callable[[ChildSpec, IO[bytes]], ProcessHandle]


def start_child(
    spec: ChildSpec, log: IO[bytes], prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the station's process: `python -m polyrhythm.runtime.processes.child`, with its spec on standard input.

    prefix: words before the command; environment: variables in addition to those of this process."""
    own = environment_of(spec.resources) | dict(environment or {})
    # A session of its own: what a terminal sends to main's group is main's affair from the first moment.
    with in_memory(msgspec.msgpack.encode(spec), spec.folder) as content:
        return subprocess.Popen(  # noqa: S603
            [*prefix, *station_command(spec)], stdin=content, stdout=log, stderr=log, env=own, start_new_session=True
        )


def station_command(spec: ChildSpec) -> list[str]:
    """What is started for a station; its name is for `ps`."""
    return [sys.executable, "-m", "polyrhythm.runtime.processes.child", rank_name(spec.station, spec.rank)]


def environment_of(seat: Resources) -> dict[str, str]:
    """The environment of a process with this seat."""
    threads = str(seat.threads)
    own = {
        **same_imports(),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | own | seat.environment


def in_memory(content: bytes, folder: str) -> IO[bytes]:
    """A file without a name that has this content; unlike a pipe it takes any size at once. It is in memory, because
    the content has the keys of the run; where the system has no such files, it is in the run's folder ("": the
    system's temporary one)."""
    file: IO[bytes]
    if sys.platform == "linux":
        file = os.fdopen(os.memfd_create("spec"), "w+b")
    else:
        file = tempfile.TemporaryFile(dir=folder or None)  # noqa: SIM115 - closed by the caller
    file.write(content)
    file.seek(0)
    return file


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
            with suppress(OSError):  # no such controller, or not for us to see
                most, used = (folder / "pids.max").read_text().strip(), (folder / "pids.current").read_text()
                left = min(left, math.inf if most == "max" else max(0, int(most) - int(used)))
    return left
