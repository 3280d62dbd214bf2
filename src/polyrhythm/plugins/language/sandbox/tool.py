"""Python tool for environments: runs a model's code in a sandbox and returns its printed output.

`open_tool(settings)` returns this process's tool; any thread may use it. `start` begins a call and `finish` waits for
it, so the calls of many rows overlap.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.imports import SOURCE

_LOG = logging.getLogger(__name__)

Value = TypeVar("Value")
Mechanism = Literal["seccomp", "landlock", "namespaces"]
Ended = Literal["done", "error", "time", "killed"]

#: What to do where a mechanism is lacking.
_REMEDIES: dict[str, str] = {
    "seccomp": "use a machine with x86-64 and a Linux kernel with seccomp",
    "landlock": "use Linux 5.13 or newer, started with landlock among the kernel's lsm=",
    "namespaces": "allow unprivileged user namespaces (in a container: a seccomp profile with unshare and mount; on "
    "Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0)",
}
#: Modules that every call finds imported.
_USUAL = (
    "bisect", "collections", "datetime", "decimal", "fractions", "functools", "heapq", "itertools", "json", "math",
    "operator", "random", "re", "statistics", "string", "typing",
)  # fmt: skip
#: One thread in numerical libraries, and equal orders of sets in every process.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_BOOT = "import sys; sys.path.append({!r}); from polyrhythm.plugins.language.sandbox.server import main; main()"
_MOST_TEXT = 2**20
#: Run in place of code that is longer.
_TOO_LONG = b"raise SystemExit('the code is longer than 1 MiB; it was not run')"
#: Seconds in which the sandbox has imported its modules.
_START_S = 120.0


class SandboxSettings(BaseModel):
    """Limits of one call of the Python tool, and what isolation it may do without."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    wall_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Seconds after which a call is ended."""
    cpu_s: Annotated[int, Field(ge=1)] = 2
    """Seconds of CPU time after which it is ended."""
    memory_mib: Annotated[int, Field(ge=64)] = 512
    """Its address space; what exceeds it is a MemoryError."""
    files_mib: Annotated[int, Field(ge=0)] = 8
    """All files in its working folder, which is in memory and starts empty; 0: nothing can be written."""
    open_files: Annotated[int, Field(ge=8)] = 32
    """Files that are open at a time."""
    output_bytes: Annotated[int, Field(ge=1, le=2**20)] = 4096
    """What is shown of its output, from the beginning."""
    at_a_time: Annotated[int, Field(ge=1)] = 4
    """Calls that run at a time, of one process of the run."""
    modules: tuple[str, ...] = ()
    """Modules that are imported before the first call, such as numpy; without any, installed packages are not to be
    found."""
    may_lack: tuple[Mechanism, ...] = ()
    """Isolation that may be missing where the machine does not give it: seccomp, landlock, namespaces."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Result of a call. output: the printed text, shortened; ended: `done`, `error` (raised, or non-zero exit
    status), `time` (wall or CPU limit), `killed` (by a signal, as after a crash)."""

    output: str
    ended: Ended
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def text(self) -> str:
        """The output, plus a line on how the call ended unless it ended normally."""
        ends = {"time": "[stopped: it took too long]\n", "killed": "[it crashed]\n"}
        gap = "" if not self.output or self.output.endswith("\n") else "\n"
        return f"{self.output}{gap}{ends[self.ended]}" if self.ended in ends else self.output


class SandboxLost(RuntimeError):
    """The call has no outcome because the sandbox failed: its process ended, or could not start a child."""


@dataclass(slots=True)
class ToolCall:
    """A started call. deadline: latest expected end, by `time.monotonic`; server: the process that runs it."""

    socket: socket.socket
    output: int
    deadline: float
    server: subprocess.Popen[bytes]


class PythonTool:
    """Runs code in this process's sandbox; threads may share it. without: mechanisms that are not used."""

    def __init__(self, settings: SandboxSettings, without: Sequence[str] = (), *, patience_s: float = 10.0) -> None:
        """patience_s: time beyond a call's limits after which the sandbox is lost. ConfigError: a mechanism lacks."""
        self._settings, self.without, self._patience_s = settings, list(without), patience_s
        self._lock = threading.Lock()
        self._calls = 0  # started, neither finished nor dropped
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._connect()
        if self.without:
            _LOG.warning("the Python tool's sandbox has no %s; see docs/sandbox.md", ", no ".join(self.without))

    def run(self, code: str) -> ToolOutcome:
        return self.finish(self.start(code))

    def start(self, code: str) -> ToolCall:
        """Begin a call. Code above 1 MiB is not run; the outcome is an error that says so."""
        text, output = os.memfd_create("code"), os.memfd_create("output")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            content = code.encode("utf-8", "replace")
            os.write(text, content if len(content) <= _MOST_TEXT else _TOO_LONG)
            server, before = self._send([text, output, theirs.fileno()])
        except BaseException:
            ours.close()
            os.close(output)
            raise
        finally:
            os.close(text)
            theirs.close()
        # The call starts after the calls before it, of which `at_a_time` run at once.
        turns = 1 + before // self._settings.at_a_time
        return ToolCall(ours, output, time.monotonic() + turns * self._settings.wall_s + self._patience_s, server)

    def finish(self, call: ToolCall) -> ToolOutcome:
        """Wait for a call. SandboxLost: the sandbox ended, or did not answer in time and was killed."""
        most = self._settings.output_bytes
        call.socket.settimeout(max(0.001, call.deadline - time.monotonic()))
        try:
            data = call.socket.recv(4096)
            written = os.pread(call.output, most + 1, 0)
        except TimeoutError as error:
            self._give_up(call.server)
            words = f"its process says nothing, {self._patience_s:g} s after the call should have ended"
            raise SandboxLost(f"the sandbox of the Python tool: {words}") from error
        finally:
            self.drop(call)
        if not data:
            self._give_up(call.server)  # while it ends, it may still take calls
        told = json.loads(data) if data else {"lost": "its process ended"}
        if "lost" in told:
            raise SandboxLost(f"the sandbox of the Python tool: {told['lost']}")
        text = written[:most].decode("utf-8", "replace") + ("…" if len(written) > most else "")
        return ToolOutcome(text, _ended(told, self._settings), float(told["wall_s"]), float(told["cpu_s"]))

    def drop(self, call: ToolCall) -> None:
        """Release a call, ending it if it still runs."""
        call.socket.close()
        os.close(call.output)
        with self._lock:
            self._calls -= 1

    def close(self) -> None:
        """Kill the sandbox and all its calls."""
        with self._lock:
            self._end()

    def _send(self, descriptors: list[int]) -> tuple[subprocess.Popen[bytes], int]:
        """Send a call to the server, restarted once if needed; return the server and the number of other calls."""
        with self._lock:
            for last in (False, True):
                process, client = self._server or self._connect()
                try:
                    socket.send_fds(client, [b"run"], descriptors)
                    self._calls += 1
                    return process, self._calls - 1
                except OSError as error:
                    self._end()
                    if last:
                        raise SandboxLost(f"the sandbox of the Python tool cannot be reached: {error}") from error
        raise AssertionError("the last try returns or raises")

    def _give_up(self, server: subprocess.Popen[bytes]) -> None:
        """Kill this server, unless another has taken its place."""
        with self._lock:
            if self._server is not None and self._server[0] is server:
                self._end()

    def _end(self) -> None:
        if self._server is not None:
            process, ours = self._server
            self._server = None
            ours.close()
            process.kill()
            process.wait()

    def _connect(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the server; retry without a missing mechanism if `may_lack` allows it."""
        while (told := self._launch()) != {"ready": True}:
            self._end()
            mechanism, problem = told.get("lacks"), told.get("problem")
            if mechanism in self._settings.may_lack and mechanism not in self.without:
                self.without.append(str(mechanism))
                continue
            if mechanism is not None:
                raise ConfigError(
                    f"env.sandbox: this machine does not give {mechanism} ({problem}), which the Python tool needs to "
                    f"be isolated; {_REMEDIES[str(mechanism)]}, or accept less with env.sandbox.may_lack: [{mechanism}]"
                )
            if missing := told.get("missing"):
                raise MissingError(
                    f"env.sandbox.modules = {list(self._settings.modules)}: {missing}; install it or leave it out"
                )
            raise SandboxLost("the sandbox of the Python tool ended at its start")
        assert self._server is not None
        return self._server

    def _launch(self) -> Any:
        """Start a server; return what it says: that it is ready, or what it lacks."""
        settings, modules = self._settings, list(self._settings.modules)
        packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")] if modules else []
        readable = _readable(packages)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        described = {
            "socket": theirs.fileno(),
            "ours": SOURCE,
            "without": self.without,
            "packages": list(dict.fromkeys(packages)),
            "readable": readable,
            "hidden": _packages_within(readable, packages),
            "modules": [*_USUAL, *modules],
            "limits": settings.model_dump(include={"cpu_s", "memory_mib", "files_mib", "open_files", "output_bytes"}),
            "wall_s": settings.wall_s,
            "at_a_time": settings.at_a_time,
        }
        command = [sys.executable, "-P", "-s", "-S", "-B", "-u", "-X", "utf8", "-c", _BOOT.format(SOURCE)]
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own program
                [*command, json.dumps(described)],
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        self._server = process, ours
        ours.settimeout(_START_S)
        try:
            told = json.loads(ours.recv(4096) or b"{}")
        except TimeoutError:
            self._end()
            raise SandboxLost(
                f"the sandbox of the Python tool did not start within {_START_S:g} s; a module that it imports hangs "
                f"(env.sandbox.modules = {modules})"
            ) from None
        ours.settimeout(self._patience_s)  # limits sends to a server that no longer reads
        return told


def _readable(packages: Sequence[str]) -> list[str]:
    """Folders of Python and of shared libraries, without subfolders of one another."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix}
    standard = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")] + [f"{sys.base_prefix}/lib"]
    folders = [*standard, "/lib", "/lib64", "/usr/lib", "/usr/lib64", *packages]
    found = sorted({os.path.normpath(folder) for folder in folders if os.access(folder, os.R_OK | os.X_OK)})
    return [folder for folder in found if not any(folder.startswith(f"{other}/") for other in found)]


def _packages_within(readable: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Folders of packages below the readable ones, such as those of the base Python, except the wanted ones."""
    names = [f"{versions}{kind}-packages" for versions in ("", "python*/") for kind in ("site", "dist")]
    found = {path for folder in readable for name in names for path in Path(folder).glob(name)}
    found = {path for path in found if not path.is_symlink()} | {path.resolve() for path in found}
    kept = {Path(path).resolve() for path in wanted}
    below = [path for path in found if any(path.is_relative_to(folder) for folder in readable)]
    return sorted(str(path) for path in below if path.resolve() not in kept)


def _ended(told: dict[str, Any], settings: SandboxSettings) -> Ended:
    status = int(told["status"])
    by_kernel = status == -signal.SIGKILL and told["cpu_s"] >= settings.cpu_s  # the server was too late
    if told["timed_out"] or by_kernel:
        return "time"
    return "done" if not status else "error" if status > 0 else "killed"


class Shared(Generic[Value]):
    """Objects of this process that users with equal keys share: made for the first, ended with the last."""

    def __init__(self, end: Callable[[Value], None]) -> None:
        self._end, self._lock = end, threading.Lock()
        self._held: dict[Hashable, tuple[Value, int]] = {}

    def open(self, key: Hashable, make: Callable[[], Value]) -> tuple[Value, Callable[[], None]]:
        """The object of the key, made if there is none, and what ends its use; a second call of that does nothing."""
        with self._lock:
            value, users = self._held.get(key) or (make(), 0)
            self._held[key] = value, users + 1
        use = ExitStack()
        use.callback(self._leave, key)
        return value, use.close

    def _leave(self, key: Hashable) -> None:
        with self._lock:
            value, users = self._held.pop(key)
            if users > 1:
                self._held[key] = value, users - 1
                return
        self._end(value)  # may take seconds: without the lock, which every `open` needs


_TOOLS = Shared(PythonTool.close)


def open_tool(settings: SandboxSettings) -> tuple[PythonTool, Callable[[], None]]:
    """This process's tool with these settings, and what ends its use; the last user ends the sandbox."""
    return _TOOLS.open(settings, lambda: PythonTool(settings))
