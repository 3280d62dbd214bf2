"""Who may speak over tcp: the run's own, nobody else; over ipc whoever can enter the folder, which is this user."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq
from tests.process.runs import wait_until
from tests.runtime.strangers import WAYS, Stranger

from polyrhythm.errors import StartError
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.transport import authentication
from polyrhythm.runtime.transport.authentication import MOST_UNPROVEN, Connections, RunKeys, make_keys
from polyrhythm.runtime.transport.sockets import Sockets

KEYS = make_keys()


@pytest.fixture
def refused() -> list[int]:
    return []


@pytest.fixture
def sockets(tmp_path: Path, refused: list[int]) -> Iterator[Sockets]:
    with closing(Sockets("tcp", str(tmp_path), KEYS, lambda: refused.append(1), 1000)) as sockets:
        yield sockets
    assert not [thread for thread in threading.enumerate() if thread.name == "authenticator"]


def test_the_runs_own_are_heard(sockets: Sockets, refused: list[int]) -> None:
    with ExitStack() as stack:
        inboxes = [stack.enter_context(closing(sockets.inbox(name))) for name in "ab"]
        for number, inbox in enumerate(inboxes):
            for sender in range(3):
                outbox = stack.enter_context(closing(sockets.outbox(inbox.endpoint)))
                outbox.send(b"%d %d" % (number, sender))
            assert sorted(inbox.receive(10) or b"" for _ in range(3)) == [b"%d %d" % (number, i) for i in range(3)]
    assert not refused


@pytest.mark.parametrize("way", WAYS)
def test_a_stranger_is_refused_and_counted_and_the_runs_own_go_on(
    way: str, sockets: Sockets, refused: list[int]
) -> None:
    with closing(sockets.inbox("main")) as inbox, closing(sockets.outbox(inbox.endpoint)) as outbox:
        outbox.send(b"before")
        assert inbox.receive(10) == b"before"
        with closing(Stranger(way, inbox.endpoint, KEYS)) as stranger:
            stranger.say([b"stop"])
            if way != "raw":
                wait_until(lambda: refused)
        wait_until(lambda: refused)
        outbox.send(b"after")
        assert inbox.receive(10) == b"after"
        assert inbox.receive(0.05) is None


def test_the_runs_own_are_never_counted_however_their_connections_interleave(
    sockets: Sockets, refused: list[int]
) -> None:
    with closing(sockets.inbox("main")) as inbox:
        for _ in range(40):
            first, second = sockets.outbox(inbox.endpoint), sockets.outbox(inbox.endpoint)
            first.send(b"x")
            assert inbox.receive(10) == b"x"
            first.close()  # while the other has just been accepted, or not yet
            second.send(b"x")
            assert inbox.receive(10) == b"x"
            second.close()
        assert not refused
        with closing(Stranger("raw", inbox.endpoint, KEYS)) as stranger:
            stranger.say([b"stop"])
        wait_until(lambda: refused)


@pytest.mark.parametrize(
    ("events", "strangers"),
    [
        (["+1", "ok", "+2", "ok", "-1", "-2"], 0),
        (["+1", "+2", "ok", "-1", "ok", "-2"], 0),
        (["+1", "ok", "+2", "-1", "ok", "-2"], 0),
        (["+1", "+2", "ok", "ok", "-1", "-2", "+1", "-1"], 1),
        (["+1", "ok", "-1", "+1", "-1"], 1),
        (["+1", "+2", "ok", "-2", "-1"], 1),
        (["+1", "ok", "-1", "-1", "-1", "+2", "-2"], 1),
    ],
)
def test_connections_are_proven_one_by_one(events: list[str], strangers: int) -> None:
    connections, found = Connections(), 0
    for event in events:
        if event == "ok":
            connections.prove()
        elif event[0] == "+":
            connections.accept(int(event[1:]))
        else:
            found += connections.is_stranger(int(event[1:]))
    assert found == strangers


def test_who_sends_too_much_at_once_is_cut_off(sockets: Sockets) -> None:
    with closing(sockets.inbox("main")) as inbox, closing(sockets.outbox(inbox.endpoint)) as outbox:
        outbox.send(bytes(3500))
        assert inbox.receive(10) == bytes(3500), "its reader counts it"
        outbox.send(bytes(4100))
        assert inbox.receive(0.2) is None
        with closing(sockets.outbox(inbox.endpoint)) as other:
            other.send(bytes(500))
            assert inbox.receive(10) == bytes(500)


def test_an_inbox_that_cannot_be_bound_leaves_the_others(sockets: Sockets) -> None:
    with closing(sockets.inbox("main")) as inbox, closing(sockets.outbox(inbox.endpoint)) as outbox:
        with pytest.raises(zmq.ZMQError):
            sockets.outbox("tcp://nowhere")
        outbox.send(b"x")
        assert inbox.receive(10) == b"x"


def test_closing_with_sockets_that_are_still_open_ends_the_thread(tmp_path: Path) -> None:
    sockets = Sockets("tcp", str(tmp_path), KEYS, lambda: None, 1000)
    inbox, outbox = sockets.inbox("main"), sockets.outbox("tcp://127.0.0.1:9")
    inbox.close()
    outbox.close()
    sockets.close()
    sockets.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "authenticator"]


def test_every_run_has_its_own_keys_and_shows_none() -> None:
    runs = [make_keys(), make_keys()]
    pairs = [pair for keys in runs for pair in (keys.inbox, keys.outbox)]
    assert len({key for pair in pairs for key in (pair.public, pair.secret)}) == 8
    assert repr(runs[0]) == "RunKeys(inbox=KeyPair(), outbox=KeyPair())"


def test_without_curve_tcp_is_refused_in_one_sentence() -> None:
    with pytest.raises(StartError, match=r"data_plane.transport = tcp: .* built without CURVE.*; set data_plane.*=ipc"):
        make_keys(has_curve=False)


def test_a_runs_folder_is_its_users_alone() -> None:
    memory = SharedRunFolder({})
    try:
        assert memory.folder.stat().st_mode & 0o777 == 0o700
        with closing(Sockets("ipc", str(memory.folder), None, lambda: None, 1000)) as sockets:
            assert sockets.could_be(f"ipc://{memory.folder}/main")
            for other in (
                "ipc:///tmp/main",
                f"ipc://{memory.folder}/{'x' * 99}",
                f"ipc://{memory.folder}/../main",
                f"ipc://{memory.folder}/\x00",
                "",
            ):
                assert not sockets.could_be(other)
    finally:
        memory.remove()


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(StartError, match=r"= 750, user .*: others can reach .*; make it a folder of user .* mode 700"):
        Sockets("ipc", str(tmp_path), None, lambda: None, 1000)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:x", "tcp://10.0.0.1:80", "ipc:///x", "\n"],
)
def test_an_inbox_of_another_host_is_none_of_this_run(address: str, sockets: Sockets) -> None:
    assert not sockets.could_be(address)
    assert sockets.could_be("tcp://127.0.0.1:5555")


def test_keys_travel_in_a_message_and_come_out_whole() -> None:
    import msgspec

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(KEYS), type=RunKeys) == KEYS


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_idle_strangers_are_bounded_and_keep_nobody_out(sockets: Sockets, refused: list[int]) -> None:
    with (
        closing(sockets.inbox("main")) as inbox,
        closing(sockets.outbox(inbox.endpoint)) as outbox,
        ExitStack() as held,
    ):
        outbox.send(b"before")
        assert inbox.receive(10) == b"before"
        address, before = ("127.0.0.1", int(inbox.endpoint.rpartition(":")[2])), open_files()
        for _ in range(4 * MOST_UNPROVEN):
            held.enter_context(socket.create_connection(address, 5))
        with closing(sockets.outbox(inbox.endpoint)) as late:
            late.send(b"late")
            assert inbox.receive(10) == b"late", "the oldest goes, not the newest"
        wait_until(lambda: open_files() - before <= 5 * MOST_UNPROVEN + 4)  # a client's end each, and an inbox's
        outbox.send(b"after")
        assert inbox.receive(10) == b"after", "who has proven its keys is not ended, however old"
        wait_until(lambda: len(refused) >= 2 * MOST_UNPROVEN)


def test_connections_that_come_and_go_leave_nothing(sockets: Sockets, refused: list[int]) -> None:
    with closing(sockets.inbox("main")) as inbox, closing(sockets.outbox(inbox.endpoint)) as outbox:
        address, before = ("127.0.0.1", int(inbox.endpoint.rpartition(":")[2])), open_files()
        for _ in range(500):
            socket.create_connection(address, 5).close()
        wait_until(lambda: len(refused) >= 450)
        outbox.send(b"x")
        assert inbox.receive(10) == b"x"
        wait_until(lambda: open_files() - before <= 4)


def test_a_stranger_that_sends_much_is_ended_before_it_fills_memory(tmp_path: Path) -> None:
    refused: list[int] = []
    with (
        closing(Sockets("tcp", str(tmp_path), KEYS, lambda: refused.append(1), 2**24)) as sockets,
        closing(sockets.inbox("main")) as inbox,
        socket.create_connection(("127.0.0.1", int(inbox.endpoint.rpartition(":")[2])), 5) as stranger,
    ):
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
        stranger.sendall(greeting + b"\x06" + (2**25).to_bytes(8, "big"))  # a command of 32 MiB begins
        sent = 0
        with suppress(ConnectionError):  # reset, or a broken pipe
            while sent < 2**25:
                sent += stranger.send(bytes(2**14))
                time.sleep(0.001)
        assert sent < 2**25
        wait_until(lambda: refused)


def test_a_silent_stranger_is_ended_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authentication, "_HANDSHAKE_MS", 200)
    refused: list[int] = []
    with (
        closing(Sockets("tcp", str(tmp_path), KEYS, lambda: refused.append(1), 1000)) as sockets,
        closing(sockets.inbox("main")) as inbox,
        socket.create_connection(("127.0.0.1", int(inbox.endpoint.rpartition(":")[2])), 5) as stranger,
    ):
        stranger.settimeout(5)
        stranger.sendall(b"\xff")
        while stranger.recv(100):
            pass
        wait_until(lambda: refused)
