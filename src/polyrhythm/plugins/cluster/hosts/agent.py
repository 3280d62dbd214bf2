"""A host's agent, `python -m polyrhythm.plugins.cluster.hosts.agent`: its spec on stdin, what it found on stdout.

It looks whether it shares memory with a host that the run has already, by opening that host's memory; then there is
nothing to do. Otherwise this is another host: the agent makes the run's folder here, and serves what it will hold to
the other hosts until the process that started it ends. Stations come and go meanwhile; what they finished stays.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from polyrhythm.errors import PolyrhythmError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import client_of
from polyrhythm.plugins.cluster.hosts.identity import Known, find_shared, start_cleaner, write_identity
from polyrhythm.plugins.cluster.hosts.memory import segment_sizes
from polyrhythm.plugins.cluster.hosts.server import DataServer, HostServer
from polyrhythm.plugins.cluster.hosts.watch import HostWatch
from polyrhythm.plugins.cluster.transport.sealed import check_sealing
from polyrhythm.readable import set_up_logging
from polyrhythm.runtime.hosts import MAIN
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout
from polyrhythm.runtime.memory.process_memory import ARENA, WEIGHTS
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment, shared_root
from polyrhythm.runtime.transport.authentication import RunKeys
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import Sockets
from polyrhythm.specs import WeightsLayout

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
#: Seconds between two looks whether the parent lives.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent is told. host: the name of this host, if it is another; known: the hosts that the run has; folder:
    of the run on this host, if there is one already; publishers: hosts where weights are published; address: of this
    host for the others; parent: process id of who started it; main: the endpoint of main's host, "" if this is it;
    silence_s: after which the agent ends that cannot reach it."""

    host: str
    known: tuple[Known, ...]
    folder: str
    layout: ArenaLayout
    weights: WeightsLayout
    publishers: tuple[str, ...]
    address: str
    keys: RunKeys
    parent: int = 0
    main: str = ""
    silence_s: float = math.inf


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
            _say(Found(error=str(error)))
            return
        _say(found)
        while server is not None and os.getppid() == spec.parent:
            if watch is not None and watch.is_silent_for(spec.silence_s):
                log.error("main's host cannot be reached: this host is lost to the run")
                return
            server.serve(_LOOK_S)


def _open(spec: AgentSpec, stack: ExitStack) -> tuple[Found, HostServer | None, HostWatch | None]:
    if not spec.folder and (shared := find_shared(spec.known, shared_root())):
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
        folder, token = made.folder, write_identity(made.folder)
    drops = DropCounter("the host's server")
    sockets = Sockets("tcp", str(folder), spec.keys, drops.stranger, q.LARGEST_QUESTION, address=spec.address)
    stack.callback(sockets.close)
    arena = Arena(spec.layout, memoryview(open_segment(folder, ARENA)))
    published = None
    if spec.host in spec.publishers:
        published = PublishedMemory(spec.weights, memoryview(open_segment(folder, WEIGHTS)), folder)
    server = HostServer(sockets, DataServer(arena, published, folder, drops), drops)
    stack.callback(server.close)
    watch = None
    if spec.main:
        watch = HostWatch(client_of(sockets, MAIN, spec.main))
        stack.callback(watch.close)
    return Found(spec.host, str(folder), token, server.endpoint), server, watch


def _say(found: Found) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.flush()


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    sys.exit(0)


def main() -> None:
    """Read the spec and serve. The folder goes when the process that started this one ends, however it ends."""
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=AgentSpec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != spec.parent:
        sys.exit(1)
    set_up_logging()
    serve(spec)


if __name__ == "__main__":
    main()
