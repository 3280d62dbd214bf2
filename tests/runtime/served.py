"""The server of a host, in a thread, and a client of it; both end when the client is collected."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient
from polyrhythm.runtime.hosts.server import DataServer
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.transport.authentication import make_keys
from polyrhythm.runtime.transport.sockets import Sockets

_LOOK_S = 0.05


def blank_arena() -> Arena:
    return in_memory(ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={}))


def served(folder: Path, arena: Arena, weights: PublishedMemory | None = None, host: str = "far") -> DataClient:
    """A client of a server that has this arena and these weights, over an authenticated connection."""
    keys = make_keys()
    sockets = [Sockets("tcp", str(folder), keys, lambda: None, q.LARGEST_QUESTION) for _ in range(2)]
    end = sockets[0].answering(q.LARGEST_QUESTION)
    server, over = DataServer(end, arena, weights), threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.serve(_LOOK_S)
        end.close()

    thread = threading.Thread(target=serve, name="server", daemon=True)
    thread.start()
    largest = q.PART_BYTES + q.HEAD_BYTES
    client = DataClient(host, lambda: sockets[1].asking(end.endpoint, largest), answer_s=10.0)

    def close() -> None:
        over.set()
        thread.join()
        for own in sockets:
            own.close()

    weakref.finalize(client, close)
    return client
