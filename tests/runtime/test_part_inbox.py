"""How the messages of a process reach its parts: each its own, in order, and nothing for a part that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyrhythm.runtime.processes.station_thread import FrameReader, InboxThread, OwnInbox, PartInbox, PartQueue
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.drops import DropCounter
from polyrhythm.runtime.transport.sockets import Outbox, Sockets


class Process:
    """The receiving side of a station process with so many parts, and somebody who sends to it."""

    def __init__(self, folder: Path, parts: int) -> None:
        self.drops = DropCounter("test")
        self._sockets = Sockets("ipc", str(folder), None, self.drops.stranger, wire.LARGEST)
        inbox = self._sockets.inbox("s.0")
        reader = FrameReader(inbox, self.drops, wire.LARGEST, parts)
        self.parts: list[PartInbox] = [OwnInbox(reader)]
        self.thread: InboxThread | None = None
        if parts > 1:
            queues = [PartQueue() for _ in range(parts)]
            self.parts = [*queues]
            self.thread = InboxThread(reader, queues, lambda: None)
        self.sender: Outbox = self._sockets.outbox(inbox.endpoint)

    def close(self) -> None:
        self.sender.close()
        for part in self.parts:
            part.close()
        self._sockets.close(unsent=True)


@pytest.fixture(params=[1, 3], ids=["one part", "three parts"])
def process(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path, request.param)
    yield process
    process.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "inbox"]


def received(inbox: PartInbox, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        content = inbox.receive(10.0)
        assert content is not None, f"{len(found)} of {count} came"
        found.append(bytes(content))
    return found


def test_each_part_gets_its_own_messages_in_order(process: Process) -> None:
    parts = len(process.parts)
    for first in range(0, 300, 10):
        process.sender.send(wire.frame([(number % parts, b"%d" % number) for number in range(first, first + 10)]))
    for part, inbox in enumerate(process.parts):
        mine = [b"%d" % number for number in range(300) if number % parts == part]
        assert received(inbox, len(mine)) == mine
        assert inbox.receive() is None
        assert inbox.receive(0.001) is None
    assert process.drops.counts() == {}


def test_what_is_damaged_or_for_nobody_is_dropped_and_the_rest_arrives(process: Process) -> None:
    parts = len(process.parts)
    for content in (
        b"\xff damaged",
        wire.frame([(0, b"first"), (parts, b"for nobody"), (-1, b"nor this"), (parts - 1, b"last")]),
        bytes(wire.LARGEST + 1),
        wire.frame([(0, b"end")]),
    ):
        process.sender.send(content)
    expected = [[b"first", b"last", b"end"]] if parts == 1 else [[b"first", b"end"], [], [b"last"]]
    for inbox, messages in zip(process.parts, expected, strict=True):
        assert received(inbox, len(messages)) == messages
    assert process.drops.counts() == {"undecodable": 1, "misdirected": 2, "too_large": 1}
