"""The order that numbers the devices of a cluster's nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from itertools import permutations
from typing import Any

import pytest
from tests.long import long

from polyrhythm.plugins.cluster.ray.inventory import in_order


def node(address: str, id_: str, **resources: float) -> dict[str, Any]:
    return {"NodeManagerAddress": address, "NodeID": id_, "Resources": resources}


def test_the_head_is_first_then_addresses_by_number_then_ids() -> None:
    head = node("10.0.0.9", "f", **{"node:__internal_head__": 1.0})
    rest = [node("10.0.0.2", "b"), node("10.0.0.2", "c"), node("10.0.0.10", "a"), node("fd00::1", "d")]
    for nodes in permutations([head, *rest]):
        assert in_order(nodes) == [head, *rest]
    named = [node("alpha", "b"), node("beta", "a")]
    assert in_order([*reversed(named)]) == named


#: Seconds that Ray gives a connection, here.
QUICK = dict.fromkeys(("RAY_gcs_rpc_server_connect_timeout_s", "RAY_gcs_rpc_server_reconnect_timeout_s"), "1")
READ = """
import sys
from polyrhythm.errors import MissingError
from polyrhythm.plugins.cluster.ray.inventory import read_nodes
try:
    read_nodes(sys.argv[1])
except MissingError as error:
    print(error)
"""


@long(4, "a server that is none of Ray's")
def test_a_server_that_closes_after_the_hello_is_one_sentence() -> None:
    """It passes for one of gRPC. In a process of its own, as Ray reads its settings once."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            """Consumes: connections. Waits for: one. Unblocked by: it, or the test's end. Produces: answers."""
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(64)
                    connection.sendall(bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = [sys.executable, "-c", READ, address]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, env={**os.environ, **QUICK}, check=False
        )
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    assert done.stdout.startswith(f"ray.address = {address}: a server answers there, but does not say which nodes"), (
        done
    )
    assert "Traceback" not in done.stderr
