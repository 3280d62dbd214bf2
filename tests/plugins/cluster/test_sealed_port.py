"""Who gets a sealed connection, who does not, and that neither harms the others."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from tests.process.runs import wait_until

from polyrhythm.plugins.cluster import sealed_port
from polyrhythm.plugins.cluster.sealed import ConnectionTicket, SealedConnection, connect
from polyrhythm.plugins.cluster.sealed_port import PortLimits, SealedPort
from polyrhythm.runtime.transport.drops import DropCounter

ADDRESS = "127.0.0.1"
LARGE = bytes(2**26)
PATIENCE_S = 30.0


class Port(SealedPort):
    """Answers each question with what it was; b"large" with more than the kernel takes."""

    def __init__(self, drops: DropCounter | None = None, **limits: Any) -> None:
        self.drops, self.patience_s = drops or DropCounter("test"), PATIENCE_S
        super().__init__(ADDRESS, self._echo, 100, self.drops, PortLimits(**limits))

    def _echo(self, connection: SealedConnection) -> None:
        while connection.wait():
            (question,) = connection.receive(self.patience_s)
            connection.send([LARGE if question == b"large" else question], self.patience_s)

    def connect(self, ticket: ConnectionTicket | None = None) -> SealedConnection:
        return connect(ADDRESS, ticket or self.admit(), 2 * len(LARGE), 10)

    def knock(self, brought: bytes = b"") -> socket.socket:
        """A plain connection to the port, which has sent this."""
        plain = socket.create_connection((ADDRESS, self.admit().port), 10)
        plain.sendall(brought)
        return plain

    @property
    def threads(self) -> int:
        return len(self._open)


@pytest.fixture
def port() -> Iterator[Port]:
    before = threading.active_count()
    with closing(Port()) as port:
        yield port
    wait_until(lambda: threading.active_count() == before)


def ask(connection: SealedConnection, question: bytes = b"word") -> bytes:
    connection.send([question], 10)
    (answer,) = connection.receive(10)
    return bytes(answer)


def is_refused(connection: SealedConnection) -> bool:
    try:
        ask(connection)
    except OSError:
        return True
    return False


def test_who_has_a_ticket_is_answered_beside_others(port: Port) -> None:
    with ExitStack() as stack:
        ends = [stack.enter_context(closing(port.connect())) for _ in range(5)]
        for _ in range(3):
            assert [ask(end, b"%d" % number) for number, end in enumerate(ends)] == [b"0", b"1", b"2", b"3", b"4"]
        assert port.threads == 5
    wait_until(lambda: not port.threads)
    assert port.drops.counts() == {}


@pytest.mark.parametrize("way", ["used", "unknown", "old"])
def test_a_ticket_is_good_once_and_for_a_while(way: str) -> None:
    with closing(Port(**({"ticket_s": 0.1} if way == "old" else {}))) as port:
        refuse(way, port)


def refuse(way: str, port: Port) -> None:
    ticket = port.admit()
    if way == "old":
        time.sleep(0.2)
    if way == "unknown":
        ticket = ConnectionTicket(ticket.port, bytes(16), ticket.asking, ticket.answering)
    if way == "used":
        with closing(port.connect(ticket)) as first:
            assert ask(first) == b"word"
    with closing(port.connect(ticket)) as end:
        assert is_refused(end)
    wait_until(lambda: port.drops.counts() == {"stranger": 1})


def test_who_has_a_ticket_but_not_its_keys_is_not_answered(port: Port) -> None:
    ticket = port.admit()
    with closing(port.connect(ConnectionTicket(ticket.port, ticket.name, bytes(32), ticket.answering))) as end:
        assert is_refused(end)
    wait_until(lambda: port.drops.counts() == {"undecodable": 1} and not port.threads)


@pytest.mark.parametrize("brought", [b"", b"half", b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_has_no_thread_and_goes_in_time(brought: bytes) -> None:
    with closing(Port(ticket_s=0.2)) as port:
        with port.knock(brought) as stranger, contextlib.suppress(ConnectionResetError):  # it sent more than a ticket
            assert stranger.recv(1) == b""
        assert port.threads == 0
        wait_until(lambda: port.drops.counts() == {"stranger": 1})


def test_many_strangers_keep_nobody_out() -> None:
    with closing(Port(strangers=4)) as port, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(port.knock())
        wait_until(lambda: port.drops.counts() == {"stranger": 16})
        with closing(port.connect()) as end:
            assert ask(end) == b"word"


class Full(socket.socket):
    """A socket that listens; `refusals` times no connection can be accepted."""

    refusals = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


def test_a_process_without_descriptors_says_so_once_and_accepts_when_it_has_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", sealed_port.__name__)
    listening = Full()
    listening.bind((ADDRESS, 0))
    listening.listen()
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: listening)
    with closing(Port(pause_s=0.01)) as port, closing(port.connect()) as first:
        assert ask(first) == b"word"
        for _ in range(2):
            listening.refusals = 3
            with closing(port.connect()) as end:
                assert ask(end) == b"word"
            assert listening.refusals == 0
            assert caplog.messages == [
                "no connection can be accepted: [Errno 24] Too many open files; trying again until one can",
                "connections are accepted again",
            ]
            caplog.clear()


def test_connections_have_a_bound() -> None:
    with closing(Port(connections=2, ticket_s=0.5)) as port, closing(port.connect()) as end:
        assert ask(end) == b"word"
        port.admit()
        with pytest.raises(LookupError, match="2 connections are open already"):
            port.admit()
        time.sleep(0.6)  # the ticket has run out
        port.admit()


def test_one_that_does_not_read_holds_nobody_up_and_is_given_up(port: Port) -> None:
    port.patience_s = 0.3
    with closing(port.connect()) as reads, closing(port.connect()) as does_not:
        does_not.send([b"large"], 10)
        for _ in range(20):
            assert ask(reads) == b"word"
        wait_until(lambda: port.threads == 1)
        assert ask(reads) == b"word"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_port_whose_thread_has_ended_says_so() -> None:
    class OutOfMemory(DropCounter):
        def stranger(self) -> None:
            raise MemoryError

    with closing(Port(OutOfMemory("test"))) as port:
        port.check()
        with port.knock() as stranger:
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
        wait_until(lambda: not [each for each in threading.enumerate() if each.name == "sealed-port"])
        with pytest.raises(RuntimeError, match="the thread that accepts connections has ended"):
            port.check()


def test_half_a_question_is_waited_for_only_so_long(port: Port) -> None:
    port.patience_s = 0.1
    ticket = port.admit()
    with port.knock(ticket.name + b"\5\0") as half:
        assert half.recv(1) == b""
    wait_until(lambda: not port.threads)


def test_the_port_closes_at_once_whatever_its_connections_do() -> None:
    port = Port()
    with ExitStack() as stack:
        ticket, ends = port.admit(), [stack.enter_context(closing(port.connect())) for _ in range(2)]
        assert ask(ends[0]) == b"word"
        stack.enter_context(port.knock(ticket.name + b"\5\0"))
        ends[1].send([b"large"], 10)
        stack.enter_context(port.knock())
        wait_until(lambda: port.threads == 3)
        begin = time.monotonic()
        port.close()
        assert time.monotonic() - begin < 2
        assert port.threads == 0
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((ADDRESS, ticket.port))
