"""Looking for a cluster: what is no cluster is refused in time, whatever answers at the port."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from pydantic import ValidationError

from polyrhythm.config.sections.running import RaySettings
from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.ray import reach


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
def test_what_is_no_cluster_is_refused(answer: bytes | None, told: str) -> None:
    with answering(answer) as address, pytest.raises(StartError, match=told):
        reach.check_reachable(address, reach_s=0.2 if answer is None else 60.0)


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


# ---------------------------------------------------------------- tokens

SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: What Ray 2.60 said to a request without its token (recorded); what it says to another one ends in such a frame.
REFUSED = bytes.fromhex("00007d0105000000018840") + (
    b"\x0ccontent-type\x10application/grpc\x00\x0bgrpc-status\x0216\x00\x0cgrpc-message>InvalidAuthToken: "
    b"Authentication token is missing or incorrect"
)
TAKEN = bytes.fromhex("00000f010500000001") + b"\x00\x0bgrpc-status\x010"


UNAVAILABLE = bytes.fromhex("000010010500000001") + b"\x00\x0bgrpc-status\x0214"


@contextmanager
def cluster(length: bytes, token: bytes, *pieces: bytes) -> Iterator[str]:
    """The address of a server that takes a request with this token alone, or any if it is b"". length: of the header's
    value, `Bearer` and the token, in HPACK; pieces: what it says in place of that, one after another."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            """Consumes: connections. Waits for: each one's request. Unblocked by: it, its end, or that of the server.
            Produces: answers."""
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # the server has ended
                with connection:
                    connection.settimeout(60)
                    connection.sendall(SETTINGS)
                    said = b""
                    while not said.endswith(b"\1\0\0\0\1" + bytes(5)) and (more := connection.recv(4096)):
                        said += more
                    wanted = b"\0\x0dauthorization" + length + b"Bearer " + token
                    for piece in pieces or (TAKEN if wanted in said or not token else REFUSED,):
                        connection.sendall(piece)
                        time.sleep(0.05 * len(pieces))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@pytest.mark.parametrize(("piece", "pause_s", "reach_s"), [(b"x", 0.05, 0.5), (bytes(1 << 16), 0.0, 60.0)])
def test_who_answers_without_end_is_not_listened_to_without_end(
    piece: bytes, pause_s: float, reach_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_auth_mode"):
        monkeypatch.delenv(name, raising=False)
    cut_off = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            """Consumes: one connection. Waits for: its end. Unblocked by: it, or 25 s or 32 MB. Produces: answers."""
            connection, _ = server.accept()
            with connection:
                connection.settimeout(60)
                connection.recv(64)
                connection.sendall(SETTINGS)
                try:
                    for _ in range(500):
                        connection.sendall(piece)
                        time.sleep(pause_s)
                except ConnectionError:
                    cut_off.set()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        reach.check_reachable(f"127.0.0.1:{server.getsockname()[1]}", reach_s)
        thread.join(60)
    assert cut_off.is_set()


@pytest.mark.parametrize(
    ("length", "token"),
    [(b"\x27", "a" * 32), (b"\x7e", "b" * 119), (b"\x7f\x00", "c" * 120), (b"\x7f\xb4\x01", "d" * 300)],
)
def test_a_cluster_that_does_not_take_the_token_is_refused_at_once(
    length: bytes, token: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(**environment: str) -> str:
        for name in ("RAY_AUTH_MODE", "RAY_auth_mode", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with cluster(length, token.encode()) as address:
            try:
                reach.check_reachable(address)
            except StartError as error:
                return str(error)
        return ""

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray/auth_token").write_text(f"{token}\n")
    (tmp_path / "other").write_text("x" * 32)
    assert not look(RAY_AUTH_MODE="token")
    assert not look(RAY_auth_mode="TOKEN", RAY_AUTH_TOKEN=token, RAY_AUTH_TOKEN_PATH=str(tmp_path / "other"))
    for wrong in (
        {},
        {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": token},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 32},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "other")},
    ):
        said = look(**wrong)
        assert ": the cluster wants its token, which is not the one here; set RAY_AUTH_MODE=token and copy" in said
    assert not look(RAY_AUTH_MODE="k8s")


@pytest.mark.parametrize(
    ("pieces", "told"), [((UNAVAILABLE,), ""), ((REFUSED[:60], REFUSED[60:]), "wants its token, which is not")]
)
def test_an_answer_with_another_error_or_in_pieces_does_not_say_that_none_is_asked_for(
    pieces: tuple[bytes, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 32)
    with cluster(b"", b"", *pieces) as address, pytest.raises(StartError, match=told) if told else nullcontext():
        reach.check_reachable(address)


def test_a_token_where_the_cluster_asks_for_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes there would not understand those here: actors never run."""
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 32)
    with cluster(b"", b"") as address:
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        with pytest.raises(
            StartError, match=f"the cluster asks for none .ray.address = {address}.*; unset RAY_AUTH_MODE"
        ):
            reach.check_reachable(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        reach.check_reachable(address)


@pytest.mark.parametrize(
    ("content", "why"), [(None, r"cannot be read \(No such file or directory\)"), ("\n", "is empty")]
)
def test_where_a_token_is_asked_for_and_none_is_here_one_sentence_says_so(
    content: str | None, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a cluster that is looked for, or named and asks for none."""
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file := tmp_path / "token"))
    if content is not None:
        file.write_text(content)
    said = rf"^RAY_AUTH_MODE = token: RAY_AUTH_TOKEN is not set and {file} {why}; copy ~/.ray/auth_token from the head"
    with answering(SETTINGS) as address, pytest.raises(StartError, match=said):
        reach.check_reachable(address)
    with pytest.raises(StartError, match=said):
        reach.check_reachable("auto")
    file.write_text("x" * 32)
    reach.check_reachable("auto")
