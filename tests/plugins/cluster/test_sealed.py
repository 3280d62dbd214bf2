"""What crosses a sealed connection arrives as it was sent, or not at all."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster import sealed
from polyrhythm.plugins.cluster.hosts.build import open_hosts
from polyrhythm.plugins.cluster.sealed import (
    RECORD,
    BrokenSeal,
    ConnectionTicket,
    SealedConnection,
    check_sealing,
    new_ticket,
)

TICKET = new_ticket(1)
LARGEST = 4 * RECORD
LENGTH, AROUND = 4, 20


def sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a tcp connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    far.settimeout(10)
    return near, far


@contextmanager
def both_ends(largest: int = LARGEST) -> Iterator[tuple[SealedConnection, SealedConnection]]:
    near, far = sockets()
    with (
        closing(SealedConnection(near, TICKET.asking, TICKET.answering, largest)) as asking,
        closing(SealedConnection(far, TICKET.answering, TICKET.asking, largest)) as answering,
    ):
        yield asking, answering


@contextmanager
def receiving(stream: bytes, *, ends: bool = True) -> Iterator[SealedConnection]:
    """The answering end, to which these bytes have come; ends: and nothing will follow."""
    near, far = sockets()
    with near, closing(SealedConnection(far, TICKET.answering, TICKET.asking, LARGEST)) as answering:
        near.sendall(stream)
        if ends:
            near.shutdown(socket.SHUT_WR)
        yield answering


def all_that_opens(end: SealedConnection) -> list[list[bytes]]:
    """The messages that come before one that does not open, or the end."""
    found: list[list[bytes]] = []
    try:
        while True:
            found.append([bytes(piece) for piece in end.receive(5)])
    except (BrokenSeal, ConnectionResetError):
        return found


def record_of(content: bytes, key: bytes = TICKET.asking, number: int = 1) -> bytes:
    """A record of the format that `sealed` describes, whatever its content says."""
    length = len(content).to_bytes(LENGTH, "little")
    return length + AESGCM(key).encrypt(number.to_bytes(12, "little"), content, length)


def records_of(*messages: list[bytes], key: bytes = TICKET.asking) -> list[bytes]:
    """The records that a connection sends for these messages, which have to fit into the kernel's buffers."""
    near, far = sockets()
    with far, closing(SealedConnection(near, key, TICKET.answering, 1)) as asking:
        for message in messages:
            asking.send(message, 10)
        asking.end()
        stream = b"".join(iter(lambda: far.recv(2**16), b""))
    found = []
    while stream:
        stop = int.from_bytes(stream[:LENGTH], "little") + AROUND
        found.append(stream[:stop])
        stream = stream[stop:]
    return found


@pytest.mark.parametrize("size", [0, 1, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD + 5])
def test_pieces_of_every_size_cross_both_ways(size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    with both_ends() as ends:
        for sender, receiver in (ends, ends[::-1], ends):
            sender.send([b"", content, b"x"], 10)
            assert [bytes(piece) for piece in receiver.receive(10)] == [b"", content, b"x"]


def test_arrays_rows_and_what_is_made_last_cross_as_they_lie() -> None:
    array = np.arange(120_000, dtype=np.int32).reshape(6, 20_000)
    answers = np.zeros(3, [("a", np.float32), ("b", np.int64)])
    order = []
    with both_ends() as (asking, answering):
        asking.send([array, answers, [array[4], array[1]], np.array([True]), lambda: order.append(1) or b"1"], 10)
        found = answering.receive(10)
    assert order == [1]
    parts = [array, answers, array[[4, 1]], np.array([True])]
    assert [bytes(piece) for piece in found] == [*(part.tobytes() for part in parts), b"1"]


def test_a_piece_is_received_where_it_belongs() -> None:
    room, content = bytearray(7), [b"head", b"abcdefg", b"x"]
    with both_ends() as (asking, answering):
        for _ in range(2):
            asking.send(content, 10)
            found = answering.receive(10, lambda before, size: [memoryview(room)] if len(before) == 1 else None)
            assert [bytes(piece) for piece in found] == [b"head", b"", b"x"]
            assert bytes(room) == b"abcdefg"
        asking.send(content, 10)
        with pytest.raises(BrokenSeal, match="a piece of 4 bytes; it does not fit where it belongs"):
            answering.receive(10, lambda before, size: [memoryview(room)])


def flipped(record: bytes, place: int) -> bytes:
    found = bytearray(record)
    found[place] ^= 1
    return bytes(found)


#: Three messages of one record and its head each: h0 r0 h1 r1 h2 r2.
DAMAGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "length": lambda r: [*r[:2], flipped(r[2], 0), *r[3:]],
    "content": lambda r: [*r[:3], flipped(r[3], LENGTH + 1), *r[4:]],
    "tag": lambda r: [*r[:3], flipped(r[3], -1), *r[4:]],
    "repeated": lambda r: [*r[:2], *r],
    "repeated at the end": lambda r: [*r, *r[4:]],
    "left out": lambda r: [*r[:2], *r[4:]],
    "exchanged": lambda r: [*r[:2], *r[4:], *r[2:4]],
    "cut": lambda r: [*r[:3], r[3][:-1]],
    "cut between": lambda r: r[:3],
    "empty": lambda r: [*r[:2], bytes(AROUND), *r[2:]],
    "huge": lambda r: [*r[:2], b"\xff\xff\xff\xff" + r[2][LENGTH:], *r[3:]],
    "of the other direction": lambda r: [*r[:2], *records_of([b"1"], key=TICKET.answering)],
    "garbage": lambda r: [*r[:2], bytes(range(256))],
}


@pytest.mark.parametrize("way", DAMAGES)
def test_what_was_changed_on_its_way_does_not_open(way: str) -> None:
    messages = [[b"first"], [b"secnd"], [b"third"]]
    records = records_of(*messages)
    assert len(records) == 6
    with receiving(b"".join(DAMAGES[way](records))) as answering:
        taken = all_that_opens(answering)
    assert taken == messages[: 3 if way == "repeated at the end" else 1]


def test_bounds_are_checked_before_memory_is_taken() -> None:
    for claimed, words in ((2**62, "a piece of 4611686018427387904 bytes"), (LARGEST + 1, "a piece of")):
        near, far = sockets()
        with near:
            near.sendall(record_of(claimed.to_bytes(8, "little")))
            answering = SealedConnection(far, b"x" * 32, TICKET.asking, LARGEST)
            with closing(answering), pytest.raises(BrokenSeal, match=words):
                answering.receive(10)


@pytest.mark.parametrize("port", [0, 2**16, -1])
def test_a_ticket_for_no_port_is_none(port: int) -> None:
    content = msgspec.msgpack.encode(replace(TICKET, port=port))
    with pytest.raises(msgspec.ValidationError, match=r"\$.port"):
        msgspec.msgpack.decode(content, type=ConnectionTicket)


def test_half_a_message_is_waited_for_as_long_as_it_may_take() -> None:
    (head, record) = records_of([b"first"])
    with receiving(head + record[:-1], ends=False) as answering, pytest.raises(TimeoutError):
        answering.receive(0.1)


def test_who_takes_nothing_is_given_up() -> None:
    with both_ends() as (asking, _), pytest.raises(TimeoutError, match=r"nothing has crossed for 0.1 s"):
        asking.send([bytes(2**26)], 0.1)


def test_a_connection_is_of_use_until_it_ends_or_its_keys_are_worn_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with both_ends() as (asking, answering):
        assert asking.is_usable
        answering.send([b"unasked"], 10)
        assert answering.is_usable
        asking.wait()
        assert not asking.is_usable
    with both_ends() as (asking, answering):
        answering.end()
        assert not answering.wait()
        asking.wait()
        assert not asking.is_usable
    with both_ends() as (asking, answering):
        monkeypatch.setattr(sealed, "_MOST_RECORDS", 2)
        asking.send([b"1"], 10)
        assert asking.is_usable
        asking.send([b"1"], 10)
        assert not asking.is_usable


@pytest.mark.parametrize(("package", "found"), [(None, "none"), ("old", r"[0-9.]+")])
def test_without_the_package_a_run_on_several_hosts_does_not_begin(
    package: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives.ciphers import aead

    check_sealing()
    if package is None:
        monkeypatch.setitem(sys.modules, "cryptography", None)
    else:
        monkeypatch.setattr(aead, "AESGCM", object)
    with pytest.raises(StartError, match=f"cryptography = {found}: .*pip install 'cryptography>=47'"):
        open_hosts([], *[None] * 5)  # type: ignore[arg-type] - before it looks at anything
