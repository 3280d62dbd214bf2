"""One rank of an incarnation of a station as this machine's process: started, heard, told, ended and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from polyrhythm.imports import same_imports
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.messages import Joined, process_address, rank_name
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.supervision import LivenessMonitor
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.sockets import Outbox, Sockets

#: How much of a station's log is shown when it ends badly.
_LAST_LINES, _LAST_BYTES = 12, 16_384
#: Signals that come from somebody else: a person, the kernel for want of memory, a machine that shuts down.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Handle(Protocol):
    """A started process, as `subprocess.Popen` shows it."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit status, once it has been reaped."""
        ...

    def wait(self, timeout: float) -> int: ...

    def kill(self) -> None: ...


#: Starts the process of a spec, which logs to the file.
Spawn = Callable[[ChildSpec, IO[bytes]], Handle]


class ChildProcess:
    """A started process. joined, endpoint, addresses: its announcement, inbox and parts, once it is ready; ended: here,
    by `kill`; killed: by somebody else, before that; failure: its report of the error that ended it, if any; refusal:
    why it refused a command of main, if it did. host: where it works, "" if the run has one host."""

    def __init__(self, spec: ChildSpec, log_file: Path, now: float, spawn: Spawn) -> None:
        self.station, self.incarnation, self.rank = spec.station, spec.incarnation, spec.rank
        self.host = spec.host.own if spec.host is not None else ""
        self.monitor = LivenessMonitor(began=now)
        self.endpoint = ""
        self.addresses: tuple[str, ...] = ()
        self.joined: Joined | None = None
        self.heartbeat: wire.Heartbeat | None = None
        self.failure: wire.Failed | None = None
        self.refusal = ""
        self.ended = self.killed = False
        self._outbox: Outbox | None = None
        self.log_file = log_file
        with log_file.open("ab") as log:  # a resumed run writes on
            self._handle = spawn(spec, log)

    @property
    def name(self) -> str:
        """The station's; of a further rank `rank_name`."""
        return rank_name(self.station, self.rank)

    @property
    def pid(self) -> int:
        return self._handle.pid

    @property
    def exited(self) -> bool:
        return self._handle.poll() is not None

    @property
    def aborted(self) -> bool:
        """It has ended itself by SIGABRT, as libraries do that cannot go on."""
        return self._handle.poll() == -signal.SIGABRT

    @property
    def reachable(self) -> bool:
        """It is ready, and has not been killed here."""
        return self._outbox is not None

    def greet(self, sockets: Sockets, hello: wire.Hello, joined: Joined) -> None:
        """It is ready: connect to its inbox."""
        self.endpoint, self.addresses, self.joined = hello.endpoint, hello.addresses, joined
        self._outbox = sockets.outbox(hello.endpoint)
        self.monitor.present = True

    @property
    def address(self) -> str:
        """The name of its inbox."""
        return process_address(self.station, self.incarnation, self.rank)

    def tell(self, message: wire.Message, part: int = 0) -> None:
        """Send to one of its parts, in their order."""
        assert self._outbox is not None, f"{self.name} is not ready"
        self._outbox.send(wire.frame([(part, wire.encode(message))]))

    def tell_all(self, message: wire.Message) -> None:
        """Send to all of its parts, if it is ready."""
        if self._outbox is not None:
            content = wire.encode(message)
            self._outbox.send(wire.frame([(part, content) for part in range(len(self.addresses))]))

    def how_it_ended(self) -> str:
        """The exit in words; "" while it runs."""
        status = self._handle.poll()
        if status is None:
            return ""
        if self.failure is not None:
            return self.failure.error
        if status < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"was ended by {known.get(-status, f'signal {-status}')}"
        return f"ended with status {status}"

    def last_lines(self) -> str:
        """The end of its log."""
        with self.log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def wait(self, seconds: float) -> bool:
        """Until it has ended; False if it has not in time."""
        try:
            self._handle.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill it, unless it has ended already, and close the line to it. Once it has `exited` it writes nowhere."""
        self.ended = True
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        status = self._handle.poll()
        if status is not None:
            self.killed = -status in _FROM_OUTSIDE
        else:
            self._handle.kill()


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
