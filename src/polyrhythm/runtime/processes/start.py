"""Starts the process of a station on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

import msgspec

from polyrhythm.imports import same_imports
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import rank_name
from polyrhythm.runtime.processes.child import ChildSpec


class ProcessHandle(Protocol):
    """A started process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, once it has been reaped."""
        ...

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
