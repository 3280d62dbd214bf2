"""Fork server: a small process that has imported what calls need, and forks one child per call, which confines itself,
runs the code and exits.

Consumes: datagrams on the client's socket, each with three descriptors: the code, the output, and the call's own
socket. Waits for: children, deadlines, clients that hang up. Produces: one message per call on the call's socket when
its child has ended. It reads neither code nor output, so no child finds another call's in its memory. It ends with the
client's socket, and all children end with it.
"""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import json
import linecache
import os
import random
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from polyrhythm.plugins.language.sandbox import kernel

#: The working folder of a call, in its own root.
_WORK = "/.call"
#: Of another process, in the low bits of a clock's number: the time that it was scheduled.
_CPU_CLOCK = 2
#: Name of the code in tracebacks.
_NAME = "<python>"
#: The call's socket, until the code runs.
_SOCKET = 3
#: Files and folders in a working folder.
_MOST_FILES = 512
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Confinement:
    """Confinement shared by all calls. work: the working folder, empty without namespaces; seccomp: the filter,
    empty without it; landlock: its version, 0 without it; readable: its rules for readable paths."""

    cpu_s: int
    memory_mib: int
    files_mib: int
    open_files: int
    output_bytes: int
    readable: tuple[tuple[str, int], ...]
    work: str = ""
    seccomp: bytes = b""
    landlock: int = 0


def run_child(confinement: Confinement, parent: int, code: int, output: int, call: int) -> NoReturn:
    """Run the code in the file `code` with its output in the file `output`, then exit. parent: the server's process."""
    try:
        text = os.pread(code, os.fstat(code).st_size, 0).decode()
        _confine(confinement, parent, output, call)
    except BaseException as error:  # noqa: BLE001 - told to the client
        os.write(call, json.dumps({"lost": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    os.close(_SOCKET)
    status = 1
    try:
        status = _run(text)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _confine(confinement: Confinement, parent: int, output: int, call: int) -> None:
    """Limits are set soft and hard alike, so that reaching a time limit ends the process. The server enforces the exact
    limit of CPU time; the kernel's, which is sampled, applies when the server cannot."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the server is gone")
    writable = []  # without namespaces the working folder is deleted, and nothing can be created in it
    if confinement.work:
        if confinement.files_mib > 0:
            kernel.mount_folder(confinement.work, confinement.files_mib, _MOST_FILES)
            writable = [confinement.work]
        os.chdir(confinement.work)
    for target, source in ((1, output), (2, output), (_SOCKET, call)):
        os.dup2(source, target)
    os.closerange(_SOCKET + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if confinement.landlock:
        kernel.restrict_files(confinement.landlock, confinement.readable, writable)
    kernel.drop_capabilities()
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, 2 * confinement.cpu_s + 1),
        (resource.RLIMIT_AS, confinement.memory_mib * _MIB),
        (resource.RLIMIT_FSIZE, max(confinement.files_mib * _MIB, confinement.output_bytes + 1)),
        (resource.RLIMIT_NOFILE, confinement.open_files),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 16),
    ):
        hard = resource.getrlimit(limit)[1]
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (bound, bound))
    if confinement.seccomp:
        kernel.restrict_calls(confinement.seccomp)


def _run(text: str) -> int:
    """Run code like a notebook cell: print the value of a final expression. Returns the exit status."""
    random.seed(0)
    linecache.cache[_NAME] = (len(text), None, text.splitlines(keepends=True), _NAME)
    names = {"__name__": "__main__"}
    try:
        tree = ast.parse(text, _NAME)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, _NAME, "exec"), names)  # noqa: S102 - that is what it is for
        if isinstance(last, ast.Expr):
            exec(compile(ast.Interactive([last]), _NAME, "single"), names)  # noqa: S102
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # noqa: T201 - the code's own output
        return 0 if end.code in (None, 0) else 1
    except BaseException as error:  # noqa: BLE001 - the code's own
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:  # frames of ours
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


@dataclass(slots=True)
class _Running:
    """process: its pidfd; late: deadline by `time.monotonic`; look: when its CPU time can reach the limit at first."""

    pid: int
    process: int
    call: socket.socket
    began: float
    late: float
    look: float
    timed_out: bool = False

    def cpu_s(self) -> float:
        """CPU time so far, by the kernel's exact count; that of RLIMIT_CPU is sampled, so may be far off."""
        return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK)


class SandboxServer:
    def __init__(self, client: socket.socket, confinement: Confinement, wall_s: float, at_a_time: int) -> None:
        self._client, self._confinement = client, confinement
        self._wall_s, self._cpu_s, self._at_a_time = wall_s, confinement.cpu_s, at_a_time
        self._waiting: deque[tuple[int, int, socket.socket]] = deque()
        self._running: dict[int, _Running] = {}
        self._poll = select.poll()
        self._poll.register(client, select.POLLIN)

    def serve(self) -> None:
        while True:
            looks = [min(one.late, one.look) for one in self._running.values() if not one.timed_out]
            patience_ms = max(0, int(1000 * (min(looks) - time.monotonic())) + 1) if looks else None
            ready = {number for number, _ in self._poll.poll(patience_ms)}
            if self._client.fileno() in ready and not self._accept():
                break
            for running in list(self._running.values()):
                if running.process in ready:
                    self._finish(running)
                elif running.call.fileno() in ready:  # the client hung up
                    self._kill(running)
            self._stop_late()
            while self._waiting and len(self._running) < self._at_a_time:
                self._start(*self._waiting.popleft())
        for running in self._running.values():
            self._kill(running)

    def _accept(self) -> bool:
        data, descriptors, *_ = socket.recv_fds(self._client, 16, 3)
        if not data:
            return False
        if len(descriptors) == 3:
            code, output, call = descriptors
            self._waiting.append((code, output, socket.socket(fileno=call)))
        else:  # no descriptors were left: the client reads that its call is lost
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, code: int, output: int, call: socket.socket) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send(call, lost=f"fork: {error.strerror}")
        else:
            if not pid:
                run_child(self._confinement, parent, code, output, call.fileno())
            now = time.monotonic()
            running = _Running(pid, os.pidfd_open(pid), call, now, now + self._wall_s, now + self._cpu_s)
            self._running[running.process] = running
            self._poll.register(running.process, select.POLLIN)
            self._poll.register(call, 0)  # reports only a hang-up
        os.close(code)
        os.close(output)

    def _stop_late(self) -> None:
        """Kill calls that have reached a time limit. A call has one thread, so its CPU time never grows faster than
        wall time; it is read again only when it may have reached the limit."""
        now = time.monotonic()
        for running in self._running.values():
            if running.timed_out or now < min(running.late, running.look):
                continue
            left = self._cpu_s - running.cpu_s()
            running.look = now + left
            if left <= 0 or now >= running.late:
                running.timed_out = True
                self._kill(running)

    def _kill(self, running: _Running) -> None:
        with suppress(ProcessLookupError):  # it has ended already
            signal.pidfd_send_signal(running.process, signal.SIGKILL)

    def _finish(self, running: _Running) -> None:
        _, status, usage = os.wait4(running.pid, 0)
        self._poll.unregister(running.process)
        self._poll.unregister(running.call)
        del self._running[running.process]
        os.close(running.process)
        _send(
            running.call,
            status=os.waitstatus_to_exitcode(status),
            timed_out=running.timed_out,
            cpu_s=usage.ru_utime + usage.ru_stime,
            wall_s=time.monotonic() - running.began,
        )
        running.call.close()


def _send(call: socket.socket, **content: Any) -> None:
    with suppress(OSError):  # the client hung up
        call.send(json.dumps(content).encode())


def _prepare(client: socket.socket, settings: dict[str, Any]) -> SandboxServer:
    """Set up everything that calls share. Lacking: a mechanism is missing; ImportError: a module is missing."""
    without, readable, hidden = settings["without"], settings["readable"], settings["hidden"]
    seccomp = b"" if "seccomp" in without else kernel.filter_program()
    landlock = 0 if "landlock" in without else kernel.landlock_version()
    work = ""
    if "namespaces" in without:
        folder = Path(tempfile.mkdtemp())
        os.chdir(folder)
        folder.rmdir()
    else:
        kernel.unshare_namespaces()
        if pid := os.fork():  # the child is process 1 of the namespaces
            client.close()
            os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.change_root(readable, hidden, _WORK)
        hidden, work = [], _WORK
    sys.path[:] = [path for path in sys.path if path != settings["ours"]] + settings["packages"]
    for name in settings["modules"]:
        importlib.import_module(name)
    rules = kernel.reading_rules(readable, hidden) if landlock else ()
    confinement = Confinement(**settings["limits"], readable=rules, work=work, seccomp=seccomp, landlock=landlock)
    return SandboxServer(client, confinement, settings["wall_s"], settings["at_a_time"])


def main() -> NoReturn:
    """Report missing mechanisms or modules to the client, or serve it. The argument has settings as JSON."""
    settings = json.loads(sys.argv.pop())
    client = socket.socket(fileno=settings["socket"])
    os.environ.clear()
    sys.argv = [""]
    for name in ("exit", "quit"):
        setattr(builtins, name, sys.exit)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        server = _prepare(client, settings)
    except kernel.Lacking as lacking:
        _send(client, lacks=lacking.mechanism, problem=lacking.problem)
        os._exit(1)
    except ImportError as error:
        _send(client, missing=str(error))
        os._exit(1)
    _send(client, ready=True)
    gc.collect()
    gc.freeze()
    server.serve()
    os._exit(0)
