"""A store of torch's by which processes of several hosts meet: ranks of a trainer, and the two ends of a pair."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def serve_store(address: str, timeout: timedelta) -> tuple[TCPStore, int]:
    """A store at a free port of this address alone, and the port. timeout: of what waits for a key. OSError: this host
    does not have the address."""
    family, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.bind(where)
        port = listening.getsockname()[1]
        descriptor = listening.detach()  # the store's from now on
        store = TCPStore(
            address,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    return store, port
