"""Looking for a cluster: what is no cluster is refused in time, whatever answers at the port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pydantic import ValidationError

from polyrhythm.config.sections.running import RaySettings
from polyrhythm.errors import StartError
from polyrhythm.runtime.ray import reach


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """The address of a server that takes one connection and says this, or nothing while it stays open."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def serve() -> None:
            """Consumes: one connection. Waits for: it, and the test's end. Unblocked by: the test. Produces: answer."""
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                if answer is None:
                    over.wait(60)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join(60)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "no cluster answers there within 0.2 s; start one with `ray start --head`"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "a web server answers there, which is no head node"),
        (b"-ERR unknown command 'PRI'\r\n", r"what answers there is no head node \(it says b.-ERR unkn"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what answers there is no head node"),
    ],
)
def test_what_is_no_cluster_is_refused(answer: bytes | None, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_REACH_S", 0.2 if answer is None else 60.0)
    with answering(answer) as address, pytest.raises(StartError, match=told):
        reach.check_reachable(address)


@pytest.mark.parametrize("answer", [bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), b"", b"\x15\x03\x03\0\2\2P"])
def test_a_server_of_grpc_passes_and_one_that_wants_tls(answer: bytes) -> None:
    with answering(answer) as address:
        reach.check_reachable(address)


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1", "host:abc", "host:70000", ":6379", "ray://host:10001"])
def test_what_is_no_address_is_refused_with_the_recipe(address: str) -> None:
    with pytest.raises(ValidationError, match=r"no address of a cluster|no client of it"):
        RaySettings(address=address)


def test_local_and_auto_are_not_looked_for() -> None:
    for address in ("local", "auto"):
        reach.check_reachable(RaySettings(address=address).address)
