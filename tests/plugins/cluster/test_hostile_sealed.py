"""Mutated tickets, questions and answers on the connections between hosts: the connection ends and is counted; nobody
else notices, nothing hangs, no memory grows, and nothing else than what was sealed is heard."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing

import pytest
from tests.long import long
from tests.plugins.cluster.test_sealed import LENGTH, all_that_opens, receiving, records_of
from tests.plugins.cluster.test_sealed_port import ADDRESS
from tests.plugins.join.test_hostile_join import finished_arena, steady
from tests.process.runs import wait_until

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient, HostSilent
from polyrhythm.plugins.cluster.hosts.server import DataServer
from polyrhythm.plugins.cluster.sealed import SealedConnection, connect
from polyrhythm.plugins.cluster.sealed_port import SealedPort
from polyrhythm.runtime.transport.drops import DropCounter

#: Mutations of a default run, and of a long one: of whole connections to a port, and of answers.
CONNECTIONS = [1_000, pytest.param(30_000, marks=long(75, "30,000 mutated connections"))]
ANSWERS = [1_000, pytest.param(100_000, marks=long(70, "100,000 mutated answers"))]
QUESTIONS = [q.encode(each) for each in (q.Posted([("s.0/0", 2)]), q.SampleEntries(2, 0, 2), q.Held(), q.ReadClocks())]


def mutated(rng: random.Random, records: Sequence[bytes]) -> bytes:
    """The records with one thing wrong with them; never only something behind them."""
    found, at = [*records], rng.randrange(len(records))
    way = rng.randrange(7)
    if way == 0:
        return b"".join(found)[: rng.randrange(sum(map(len, found)))]
    if way == 1:
        del found[at]
    elif way == 2:
        found.insert(at, found[at])
    elif way == 3:
        other = rng.randrange(len(found))
        found[at], found[other] = found[other], found[at]
    elif way == 4:
        found[at] = rng.randbytes(LENGTH) + found[at][LENGTH:]
    elif way == 5:
        found[at] = rng.randbytes(rng.randrange(1, 100))
    content = bytearray(b"".join(found))
    if way == 6 or bytes(content) == b"".join(records):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(content)


def say(port: int, stream: bytes) -> None:
    """Send this to the port, and wait until it has ended the connection."""
    with socket.create_connection((ADDRESS, port), 5) as stranger:
        try:
            stranger.sendall(stream)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(2**16):
                pass
        except TimeoutError:
            raise
        except OSError:
            pass  # it was quicker


@pytest.mark.parametrize("count", CONNECTIONS)
def test_whatever_comes_to_the_port_ends_one_connection(count: int) -> None:
    rng, drops, server = random.Random(0), DropCounter("test"), DataServer(finished_arena(), None)
    heard: list[bytes] = []

    def serve(connection: SealedConnection) -> None:
        while connection.wait():
            heard.extend(map(bytes, connection.receive(5)))
            connection.send(server.answer(heard[-1]), 5)

    with (
        closing(SealedPort(ADDRESS, serve, q.LARGEST_QUESTION, drops)) as port,
        closing(connect(ADDRESS, port.admit(), 2**20, 5)) as friend,
        steady(),
    ):
        for number in range(count):
            ticket = port.admit()
            say(
                ticket.port,
                mutated(rng, [ticket.name, *records_of(*([each] for each in QUESTIONS), key=ticket.asking)]),
            )
            assert set(heard) <= {*QUESTIONS}, "nothing is heard that was not sealed"
            heard.clear()
            if number % 100 == 0:
                friend.send([QUESTIONS[2]], 5)
                assert bytes(friend.receive(5)[0]) == b""
        wait_until(lambda: [thread.name for thread in threading.enumerate()].count("sealed") == 1)
    kinds = drops.counts()
    assert kinds.keys() == {"stranger", "undecodable"}
    assert count / 2 < sum(kinds.values()) <= count
    wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("sealed")])


@pytest.mark.parametrize("count", ANSWERS)
def test_whatever_a_server_answers_is_its_answer_or_none(count: int) -> None:
    rng, messages, whole = random.Random(1), [[b"", b"x" * 100, b"y" * 3000], [b"", b"second"]], 0
    records = records_of(*messages)
    with steady():
        for _ in range(count):
            with receiving(mutated(rng, records)) as end:
                taken = all_that_opens(end)
                assert taken == messages[: len(taken)]
                whole += len(taken) == 2
    assert whole < count / 5, "few mutations are behind all that was sent"


def test_a_client_goes_on_after_an_answer_that_does_not_open() -> None:
    head, record = records_of([b"word"])
    streams = [head[:-1] + b"?" + record, record + head, head + record[:-1]]

    def serve(connection: SealedConnection) -> None:
        while connection.wait():
            connection.receive(5)
            connection.send([b"", b"word"], 5)

    with ExitStack() as stack:
        port = stack.enter_context(closing(SealedPort(ADDRESS, serve, 100, DropCounter("test"))))
        damaged = [Answered(stack.enter_context(receiving(stream))) for stream in streams]
        coming = iter([*damaged, connect(ADDRESS, port.admit(), 100, 5)])
        client = stack.enter_context(closing(DataClient("far", lambda _: next(coming), answer_s=5.0)))
        for _ in streams:
            with pytest.raises(HostSilent, match="host far cannot be asked"):
                client.ask(q.Held())
        assert list(map(bytes, client.ask(q.Held()))) == [b"word"]


class Answered:
    """A connection whose answer is there before the question."""

    is_usable = True

    def __init__(self, end: SealedConnection) -> None:
        self.receive, self.close = end.receive, end.close

    def send(self, pieces: Sequence[bytes], seconds: float) -> None: ...
