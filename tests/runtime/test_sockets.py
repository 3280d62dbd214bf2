"""Inboxes and outboxes: order, threads, addresses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import zmq

from polyrhythm.errors import StartError
from polyrhythm.runtime.transport.sockets import Inbox, Outbox, Transport, endpoint

TRANSPORTS: tuple[Transport, ...] = ("inproc", "ipc", "tcp")


class Lines:
    """Inboxes and outboxes that are closed in the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._all = str(folder), ExitStack()
        self._context: zmq.Context[zmq.Socket[bytes]] = self._all.enter_context(zmq.Context())

    def inbox(self, transport: Transport = "ipc", name: str = "inbox") -> Inbox:
        return self.bind(endpoint(transport, self._folder, name))

    def bind(self, address: str) -> Inbox:
        return self._all.enter_context(closing(Inbox(self._context, address)))

    def outbox(self, inbox: Inbox) -> Outbox:
        return self._all.enter_context(closing(Outbox(self._context, inbox.endpoint)))

    def close(self) -> None:
        self._all.close()


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    with closing(Lines(tmp_path)) as lines:
        yield lines


def received(inbox: Inbox, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        message = inbox.receive(10.0)
        assert message is not None, f"{len(found)} of {count} messages came"
        found.append(message)
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_arrive_whole_and_in_order(transport: Transport, lines: Lines) -> None:
    inbox = lines.inbox(transport)
    assert inbox.receive() is None
    assert inbox.receive(0.002) is None
    outbox = lines.outbox(inbox)
    sent = [b"%d" % number + bytes(number) for number in range(500)]
    for message in sent:
        outbox.send(message)
    assert received(inbox, 500) == sent
    assert inbox.receive() is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_threads_share_an_outbox_and_each_keeps_its_order(transport: Transport, lines: Lines) -> None:
    inbox = lines.inbox(transport)
    outbox = lines.outbox(inbox)

    def speak(name: int) -> None:
        for number in range(200):
            outbox.send(b"%d %d" % (name, number))

    threads = [threading.Thread(target=speak, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    found = received(inbox, 800)
    for thread in threads:
        thread.join()
    for name in range(4):
        assert [int(number) for sender, number in map(bytes.split, found) if int(sender) == name] == list(range(200))


def test_what_one_thread_sent_before_another_arrives_before_it(lines: Lines) -> None:
    """A trainer publishes from threads that come and go: more of them than there may be sockets, and in order."""
    inbox = lines.inbox()
    outbox = lines.outbox(inbox)
    for number in range(1500):
        thread = threading.Thread(target=outbox.send, args=(b"%d" % number,))
        thread.start()
        thread.join()
    assert [int(message) for message in received(inbox, 1500)] == list(range(1500))


def test_what_was_handed_over_before_closing_still_arrives(lines: Lines) -> None:
    inbox = lines.inbox()
    outbox = lines.outbox(inbox)
    outbox.send(b"last words")
    outbox.close(linger_s=5.0)
    assert received(inbox, 1) == [b"last words"]


def test_a_port_is_chosen_and_told(lines: Lines) -> None:
    one, other = lines.inbox("tcp", "a"), lines.inbox("tcp", "b")
    assert one.endpoint.startswith("tcp://127.0.0.1:")
    assert one.endpoint != other.endpoint


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_address_that_cannot_be_had_is_named(transport: Transport, lines: Lines, tmp_path: Path) -> None:
    taken = endpoint("ipc", str(tmp_path / "nowhere"), "inbox")
    if transport != "ipc":
        taken = lines.inbox(transport).endpoint
    with pytest.raises(StartError, match=rf"{taken} cannot be had \(.+\); free it, or choose another data_plane"):
        lines.bind(taken)
