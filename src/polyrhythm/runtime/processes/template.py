"""Starts the processes of stations as forks of one process that has imported what they need.

To import torch takes a process about 2 s of a core; a fork of one that has it takes milliseconds and shares its memory.
The template does nothing else: it has one thread, opens no device, and never runs a station itself. A fork becomes a
child of the process that asked for it, as one that was started the usual way would be: that process adopts orphans
while it asks, and the template's direct child ends at once (prctl(2), PR_SET_CHILD_SUBREAPER).

Where anything of this is not possible, `start_child` starts the process.

Invariant: a fork begins its work only when told to by who asked, who then knows its process id; without that it ends,
and who asked reaps it. So a fork that comes late does not work beside the process that was started in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.factories import Resources, StationList
from polyrhythm.runtime.processes.child import ChildSpec, die_with
from polyrhythm.runtime.processes.child import main as run_station
from polyrhythm.runtime.processes.start import ProcessHandle, environment_of, in_memory, start_child, station_command

log = logging.getLogger(__name__)

#: Seconds that the template may take to import; that a fork may take to answer, and to be adopted; that the template
#: may take to end once it is killed.
_IMPORT_S, _ANSWER_S, _ADOPT_S, _LEAVE_S = 120.0, 10.0, 5.0, 5.0
#: Seconds between two looks at a process that is waited for.
_LOOK_S = 0.005
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
#: A fork's place for its command line, which tools like `ps` show.
_TITLE_BYTES = 256
_PID_BYTES = 8


class ForkRequest(msgspec.Struct, frozen=True):
    """What a fork gets beside its spec and its log. parent: who asks; path: of imports; command: as `ps` shows it."""

    parent: int
    environment: dict[str, str]
    path: list[str]
    folder: str
    command: list[str]


class ForkedProcess:
    """A child of this process that this process has not started: a `ProcessHandle`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._turn = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, once it has been reaped; negative: the signal that ended it."""
        with self._turn:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # reaped by somebody else: its status is lost
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit status. subprocess.TimeoutExpired: it has not ended in time."""
        until = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_LOOK_S)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that has imported `modules` and forks when it is asked."""

    def __init__(self, modules: Sequence[str]) -> None:
        """OSError: it cannot be started."""
        words = [sys.executable, "-m", __name__, str(os.getpid()), *modules, " " * _TITLE_BYTES]
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.settimeout(_IMPORT_S)
        self._ready = False
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603
                    words,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment_of(Resources()),
                    start_new_session=True,
                )
            except OSError:
                self._line.close()
                raise

    def fork(self, spec: ChildSpec, log_file: IO[bytes]) -> int:
        """The process id of a fork that works on the spec. OSError: there is none, nor will be."""
        self._ready = self._ready or bool(self._line.recv(1))
        command = station_command(spec)
        request = ForkRequest(os.getpid(), environment_of(spec.resources), sys.path, str(Path.cwd()), command)
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            in_memory(msgspec.msgpack.encode(request), spec.folder) as what,
            in_memory(msgspec.msgpack.encode(spec), spec.folder) as content,
            _adopting(),
        ):
            files = [what.fileno(), content.fileno(), log_file.fileno(), theirs.fileno()]
            socket.send_fds(self._line, [b"fork"], files)
            theirs.close()  # so that what comes ends with the fork, or with the server
            ours.settimeout(_ANSWER_S)
            pid = int.from_bytes(ours.recv(_PID_BYTES), "little")
            if not pid:
                raise ChildProcessError("the fork server has ended")
            try:
                if not ours.recv(1):
                    raise ChildProcessError("the server's fork has ended, or has not been adopted")
                ours.send(b"1")
            except OSError:
                _end(ForkedProcess(pid))  # a child of this process, which would stay as a zombie
                raise
        return pid

    def close(self) -> None:
        """End it, not its forks."""
        _end(self._process)
        self._line.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None


#: Servers of runs that have ended, by their modules, for later runs; None: they end with their run.
_kept: dict[tuple[str, ...], ForkServer] | None = None


def kept_fork_servers() -> set[int]:
    """Process ids of the servers that are kept for later runs."""
    return {server.pid for server in (_kept or {}).values()}


def _take_kept(modules: tuple[str, ...]) -> ForkServer | None:
    """The server that is kept for these modules, if it has not ended meanwhile."""
    server = _kept.pop(modules, None) if _kept else None
    if server is None or server.is_alive:
        return server
    server.close()
    return None


@contextlib.contextmanager
def keeping_fork_servers() -> Iterator[None]:
    """Meanwhile the server of a run that has ended serves later runs of this process, if it has imported nothing but
    torch and modules of this package. For many short runs one after another, such as tests."""
    global _kept  # noqa: PLW0603
    assert _kept is None
    _kept = {}
    try:
        yield
    finally:
        kept, _kept = _kept, None
        for server in kept.values():
            server.close()


class Template:
    """Forks the stations that name modules to import (`preload` of their factory) and work on the CPU with one thread,
    if they are two at least; others are started as usual. With more threads numpy starts some when it is imported."""

    def __init__(self, stations: StationList) -> None:
        preload = {factory.name: getattr(factory, "preload", ()) for factory, *_ in stations}
        seats = [(factory.name, seat) for factory, *seats in stations for seat in seats]
        fitting = [name for name, seat in seats if preload[name] and _fits(seat)]
        self._names = set(fitting)
        self._modules = tuple(sorted({module for name in fitting for module in preload[name]}))
        self._server: ForkServer | None = None
        if len(fitting) < 2 or sys.platform != "linux":
            return
        try:
            self._server = _take_kept(self._modules) or ForkServer(self._modules)
        except OSError as error:
            log.debug("stations are started one by one: %s", error)

    def spawn(self, spec: ChildSpec, log_file: IO[bytes]) -> ProcessHandle:
        if self._server is not None and _fits(spec.resources) and spec.station in self._names:
            try:
                return ForkedProcess(self._server.fork(spec, log_file))
            except OSError as error:
                log.debug("stations are started one by one: %s", error)
                self._server.close()
                self._server = None
        return start_child(spec, log_file)

    def close(self) -> None:
        """End or keep the server; its forks go on. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        ours = all(module.partition(".")[0] in ("polyrhythm", "torch") for module in self._modules)
        if _kept is None or not ours or not server.is_alive or _kept.setdefault(self._modules, server) is not server:
            server.close()


def _end(process: ProcessHandle) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # from a file system that hangs
        process.wait(_LEAVE_S)


def _fits(seat: Resources) -> bool:
    """Whether a fork has what a process with this seat has."""
    return seat.torch_device == CPU and seat.threads == 1 and not seat.environment


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among the descendants of this process become its children meanwhile."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "this system lets no process adopt others")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)


# ------------------------------------------------------------ in the template


def main() -> None:
    """Import the modules, then fork as often as is asked; ends with who asks."""
    parent, *modules, _ = sys.argv[1:]
    die_with(int(parent))
    with socket.socket(fileno=os.dup(0)) as line:
        for module in modules:
            importlib.import_module(module)
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return  # a fork would lack the other threads
        gc.collect()
        gc.freeze()
        line.send(b"1")
        while files := socket.recv_fds(line, 16, 4)[1]:
            _fork(line, *files)
            for file in files:
                os.close(file)


def _fork(line: socket.socket, what: int, spec: int, log_file: int, asker: int) -> None:
    """Fork twice: the fork's parent has said its process id, and has ended, when this returns."""
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    middle = os.getpid()
    try:
        if pid := os.fork():
            os.write(asker, pid.to_bytes(_PID_BYTES, "little"))
        else:
            line.close()
            _become(middle, what, spec, log_file, asker)
    finally:
        os._exit(0)


def _become(middle: int, what: int, spec: int, log_file: int, asker: int) -> NoReturn:
    """In the forked child: run the station once the asking process has adopted it and its spec arrives."""
    try:
        with os.fdopen(what, "rb") as asked:
            request = msgspec.msgpack.decode(asked.read(), type=ForkRequest)
        until = time.monotonic() + _ADOPT_S
        while os.getppid() == middle and time.monotonic() < until:
            time.sleep(_LOOK_S / 10)
        if os.getppid() != request.parent:
            os._exit(1)
        with socket.socket(fileno=asker) as answer:
            answer.send(b"1")
            if not answer.recv(1):
                os._exit(1)
        os.setsid()
        for source, target in ((spec, 0), (log_file, 1), (log_file, 2)):
            os.dup2(source, target)
        for file in (spec, log_file):
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)
        sys.argv[1:] = request.command[3:]
        os.environ.clear()
        os.environ.update(request.environment)
        sys.path[:] = request.path
        os.chdir(request.folder)
        _show(request.command)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # the global generator, which Python does not seed anew after a fork
        run_station()
    except SystemExit:
        pass
    except BaseException:  # noqa: BLE001 - the process ends with it
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _show(command: Sequence[str]) -> None:
    """Have `ps` show this command, as far as it fits where the template's own stands."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5), counted from the third
        text = " ".join(command).encode(errors="replace")[: end - begin - 2]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))
        ctypes.memset(end - 1, 1, 1)  # says that it is one text, which ends at the first zero


if __name__ == "__main__":
    main()
