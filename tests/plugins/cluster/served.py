"""The server of a host, in a thread, and a client of it; both end when the client is collected."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, client_of
from polyrhythm.plugins.cluster.hosts.relay import Relay
from polyrhythm.plugins.cluster.hosts.server import DataServer, HostServer
from polyrhythm.plugins.cluster.sealed import SealedConnection
from polyrhythm.runtime.memory.arena import Arena, ArenaLayout, in_memory
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.transport.authentication import RunKeys, make_keys
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import Sockets

_LOOK_S = 0.05


def blank_arena() -> Arena:
    return in_memory(ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={}))


class ServedClient(DataClient):
    """endpoint: of its server."""

    endpoint = ""


def served(
    folder: Path,
    arena: Arena,
    weights: PublishedMemory | None = None,
    host: str = "far",
    first_s: float = 10.0,
    relay: Relay | None = None,
    keys: RunKeys | None = None,
) -> ServedClient:
    """A client of a server that has this arena, these weights and this relay, over an authenticated connection."""
    keys, drops = keys or make_keys(), DropCounter("test")
    sockets = [Sockets("tcp", str(folder), keys, lambda: None, q.LARGEST_QUESTION) for _ in range(2)]
    server, over = HostServer(sockets[0], DataServer(arena, weights, relay=relay), drops, first_s), threading.Event()

    def serve() -> None:
        while not over.is_set():
            server.serve(_LOOK_S)

    thread = threading.Thread(target=serve, name="server", daemon=True)
    thread.start()
    connect = client_of(sockets[1], host, server.endpoint, 10.0, q.PART_BYTES + q.HEAD_BYTES).connect
    opened: list[SealedConnection] = []

    def opening(seconds: float) -> SealedConnection:
        opened.append(connect(seconds))
        return opened[-1]

    client = ServedClient(host, opening, 10.0)
    client.endpoint = server.endpoint

    def close() -> None:
        for connection in opened:
            connection.close()
        over.set()
        thread.join()
        server.close()
        for own in sockets:
            own.close()

    weakref.finalize(client, close)
    return client
