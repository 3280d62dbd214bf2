"""Where processes of a run can be started, and a host's agent, `python -m polyrhythm.plugins.cluster.hosts.agent`: its
spec on stdin, what it found on stdout.

The agent looks whether it shares memory with a host that the run has already, by opening that host's memory; then there
is nothing to do. Otherwise this is another host: the agent makes the run's folder here, and serves what it will hold to
the other hosts until the process that started it ends. Stations come and go meanwhile; what they finished stays.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from select import select
from typing import IO, Protocol

import msgspec

from polyrhythm.errors import PolyrhythmError, StartError
from polyrhythm.imports import same_imports
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostWatch, client_of
from polyrhythm.plugins.cluster.hosts.memory import segment_sizes, start_cleaner
from polyrhythm.plugins.cluster.hosts.relay import LARGEST_PART, Relay
from polyrhythm.plugins.cluster.hosts.server import DataServer, HostServer
from polyrhythm.plugins.cluster.sealed import check_sealing
from polyrhythm.readable import set_up_logging
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.process_memory import ARENA, WEIGHTS
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment, shared_root
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.start import ProcessHandle, in_memory, start_child
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import LOOPBACK, Sockets
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
#: Seconds between two looks whether the parent lives.
_LOOK_S = 0.5
#: Seconds that an agent may take to say what it found, and to leave.
FOUND_S, _LEAVE_S = 30.0, 5.0


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent is told. host: the name of this host, if it is another; known: the hosts that the run has; folder:
    of the run on this host, if there is one already; publishers: hosts where weights are published; address: of this
    host for the others; parent: process id of who started it; main: the endpoint of main's host, "" if this is it;
    silence_s: after which the agent ends that cannot reach it; saves: the run's folder, which has to be seen from here
    because a rank of the trainer saves and reads its state there, "" if none does."""

    host: str
    known: tuple[q.Known, ...]
    folder: str
    layout: ArenaLayout
    weights: WeightsLayout
    publishers: tuple[str, ...]
    address: str
    keys: RunKeys
    parent: int = 0
    main: str = ""
    silence_s: float = math.inf
    saves: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """What an agent found. host, folder, token: of the memory here; endpoint: of its server, "" if it shares a host's
    that has one; error: why there is none of this."""

    host: str = ""
    folder: str = ""
    token: str = ""
    endpoint: str = ""
    error: str = ""


def serve(spec: AgentSpec) -> None:
    """Say what is found; where this is another host, serve until the parent has ended or SIGTERM comes."""
    with ExitStack() as stack:
        try:
            found, server, watch = _open(spec, stack)
        except (PolyrhythmError, OSError, ValueError) as error:
            found, server, watch = Found(error=str(error)), None, None
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.flush()
        while server is not None and os.getppid() == spec.parent:
            if watch is not None and watch.is_silent_for(spec.silence_s):
                log.error("main's host cannot be reached: this host is lost to the run")
                return
            server.serve(_LOOK_S)


def _open(spec: AgentSpec, stack: ExitStack) -> tuple[Found, HostServer | None, HostWatch | None]:
    if spec.saves and not Path(spec.saves).is_dir():
        raise StartError(
            f"the run's folder {spec.saves} cannot be seen there, where the trainer's ranks save their state and read "
            "it; set out_dir to a folder that all nodes share"
        )
    if not spec.folder and (shared := q.find_shared(spec.known, shared_root())):
        host, folder = shared
        return Found(host.host, str(folder), host.token), None, None
    check_sealing()
    spec.weights.verify()
    folder, token = Path(spec.folder), ""
    if not spec.folder:
        sizes = segment_sizes(spec.layout, spec.weights, spec.host, spec.publishers)
        made = SharedRunFolder(sizes)
        stack.callback(made.remove)
        stack.enter_context(start_cleaner(made.folder))
        folder, token = made.folder, q.write_identity(made.folder)
    drops = DropCounter("the host's server")
    sockets = Sockets("tcp", str(folder), spec.keys, drops.stranger, q.LARGEST_QUESTION, address=spec.address)
    stack.callback(sockets.close)
    arena = Arena(spec.layout, memoryview(open_segment(folder, ARENA)))
    published = None
    if spec.host in spec.publishers:
        published = PublishedMemory(spec.weights, memoryview(open_segment(folder, WEIGHTS)), folder)

    def other(host: str, endpoint: str) -> DataClient:
        if not sockets.could_be(endpoint):
            raise LookupError(f"host {host} is not at {endpoint!r}")
        return client_of(sockets, host, endpoint, largest=LARGEST_PART)

    relay = Relay(spec.weights, folder, other)
    stack.callback(relay.close)
    server = HostServer(sockets, DataServer(arena, published, folder, drops, relay), drops)
    stack.callback(server.close)
    watch = None
    if spec.main:
        watch = HostWatch(client_of(sockets, MAIN, spec.main))
        stack.callback(watch.close)
    return Found(spec.host, str(folder), token, server.endpoint), server, watch


def main() -> None:
    """Read the spec and serve. The folder goes when the process that started this one ends, however it ends."""
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AgentSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != spec.parent:
        sys.exit(1)
    set_up_logging()
    serve(spec)


class Node(Protocol):
    """Starts processes of the run. name: for people; address: by which other hosts reach it; abandoned: a process there
    was to end and could not be reached, so it may still live; agent_failure: how the host's agent there has ended, as
    far as this is known, "" while it serves; leaves: it is one of a cluster that says which nodes are there."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def abandoned(self) -> bool: ...
    @property
    def agent_failure(self) -> str: ...
    @property
    def leaves(self) -> bool: ...

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        """Start the host's agent there, until `close`, without waiting for it. The function returned waits for its
        answer, until `FOUND_S` after the start. StartError, from either: it does not start."""

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        """Start a station's process there."""

    def give_up(self) -> None:
        """The host there is lost: processes that are to end there are not waited for."""

    def close(self) -> None:
        """End the agent; a second call does nothing."""


class AgentProcess:
    """An agent as a child of this process. prefix: words before its command; environment: variables in addition."""

    def __init__(
        self, spec: AgentSpec, prefix: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        words = [*prefix, sys.executable, "-m", "polyrhythm.plugins.cluster.hosts.agent", spec.host]
        own = os.environ | same_imports() | dict(environment or {})
        with in_memory(msgspec.msgpack.encode(replace(spec, parent=os.getpid())), "") as content:
            self._process = subprocess.Popen(  # noqa: S603
                words, stdin=content, stdout=subprocess.PIPE, env=own, start_new_session=True
            )
        self._until = time.monotonic() + FOUND_S
        self._serves = False

    def found(self) -> Found:
        """Wait for what it finds; asked once. StartError: nothing, and it has ended."""
        output = self._process.stdout
        assert output is not None
        with ExitStack() as undo:
            undo.callback(self.close)
            ready, _, _ = select([output], [], [], max(0.0, self._until - time.monotonic()))
            line = output.readline() if ready else b""
            if not line:
                raise StartError(f"the host's agent said nothing within {FOUND_S:g} s (status {self._process.poll()})")
            found = msgspec.json.decode(line, type=Found)
            if found.error:
                raise StartError(found.error)
            undo.pop_all()
        self._serves = bool(found.endpoint)
        return found

    @property
    def failure(self) -> str:
        """How it has ended; "" while it serves, or if it had nothing to serve."""
        status = self._process.poll()
        return "" if status is None or not self._serves else f"its agent has ended with status {status}"

    def close(self) -> None:
        """End it; its folder goes with it. A second call does nothing."""
        self._process.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class LocalNode:
    """Starts processes on this machine. prefix: words before each command; environment: variables in addition, for
    example another folder for shared memory, which makes it a host of its own."""

    def __init__(
        self,
        name: str = "local",
        address: str = LOOPBACK,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.address = name, address
        self._prefix, self._environment = tuple(prefix), dict(environment or {})
        self._agent: AgentProcess | None = None
        self.abandoned = self.leaves = False

    def start_agent(self, spec: AgentSpec) -> Callable[[], Found]:
        assert self._agent is None, f"{self.name} has an agent"
        self._agent = AgentProcess(spec, self._prefix, self._environment)
        return self._agent.found

    @property
    def agent_failure(self) -> str:
        return self._agent.failure if self._agent is not None else ""

    def spawn(self, spec: ChildSpec, log: IO[bytes]) -> ProcessHandle:
        return start_child(spec, log, self._prefix, self._environment)

    def give_up(self) -> None: ...

    def close(self) -> None:
        if self._agent is not None:
            self._agent.close()
            self._agent = None


if __name__ == "__main__":
    main()
