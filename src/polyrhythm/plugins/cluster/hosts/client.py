"""Asks the server of another host. One connection for each process and host; threads take turns."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.sealed import ConnectionTicket, Place, anywhere, connect
from polyrhythm.runtime.transport.sockets import Sockets

#: Seconds of a limit that are not worth waiting for.
_LEAST_S = 1e-3
_decode_ticket = msgspec.msgpack.Decoder(ConnectionTicket).decode


class HostSilent(ConnectionError, LookupError):
    """A host did not answer in time, or its connection has ended."""


class Connection(Protocol):
    """To a host's server (`plugins.cluster.sealed.SealedConnection`)."""

    @property
    def is_usable(self) -> bool: ...

    def send(self, pieces: Sequence[Any], seconds: float) -> None: ...

    def receive(self, seconds: float, place: Place = ...) -> list[memoryview]: ...

    def close(self) -> None: ...


class DataClient:
    """Questions to the server of `host`. connect: opens a connection to it, within so many seconds. answer_s: that an
    answer may take, the first one with the connection that it needs."""

    def __init__(self, host: str, connect: Callable[[float], Connection], answer_s: float = q.ANSWER_S) -> None:
        self.host, self.connect = host, connect
        self._answer_s = answer_s
        self._connection: Connection | None = None
        self._turn = threading.Lock()

    def ask(self, question: q.Question) -> list[memoryview]:
        """The pieces of the answer. LookupError: there is none. HostSilent: none came in time."""
        (answer,) = self.ask_all([question])
        return answer

    def ask_all(
        self, questions: Iterable[q.Question | None], ahead: int = 1, place: Place = anywhere
    ) -> Iterator[list[memoryview]]:
        """The answers in order; up to `ahead` questions are on their way at a time. questions: None where the next one
        depends on an answer that is still to come; place: of the answers' pieces."""
        with self._turn:
            by = time.monotonic() + self._answer_s
            connection, waiting = self._usable(by), 0
            try:
                for question in questions:
                    if waiting == ahead or question is None:
                        answer = self._receive(connection, place, by)
                        waiting, by = waiting - 1, math.inf
                        yield _checked(self.host, answer)
                    if question is None:
                        continue
                    waiting += 1
                    with self._silence():
                        connection.send([q.encode(question)], self._left(by))
                while waiting:
                    answer = self._receive(connection, place, by)
                    waiting, by = waiting - 1, math.inf
                    yield _checked(self.host, answer)
            finally:
                if waiting:  # answers that are on their way would be taken for later ones'
                    self._drop()

    def _left(self, by: float) -> float:
        """Seconds that are left of an answer's limit, which ends `by` then, or begins now. TimeoutError: none are."""
        left = min(by - time.monotonic(), self._answer_s)
        if left < _LEAST_S:
            raise TimeoutError
        return left

    def _usable(self, by: float) -> Connection:
        """The connection, or a new one where it has ended meanwhile."""
        if self._connection is not None and not self._connection.is_usable:
            self._drop()
        if self._connection is None:
            with self._silence():
                self._connection = self.connect(self._left(by))
        return self._connection

    def _receive(self, connection: Connection, place: Place, by: float) -> list[memoryview]:
        with self._silence():
            return connection.receive(self._left(by), lambda before, size: place(before[1:], size) if before else None)

    @contextmanager
    def _silence(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise HostSilent(f"host {self.host} has not answered for {self._answer_s:g} s") from error
        except OSError as error:
            raise HostSilent(f"host {self.host} cannot be asked: {error}") from error

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        """End the connection."""
        with self._turn:
            self._drop()


def _checked(host: str, answer: list[memoryview]) -> list[memoryview]:
    """The pieces of an answer. LookupError: it is a reason why there is none."""
    refused, *pieces = answer
    if refused:
        raise LookupError(f"host {host}: {bytes(refused).decode(errors='replace')}")
    return pieces


def client_of(
    sockets: Sockets, host: str, endpoint: str, answer_s: float = q.ANSWER_S, largest: int = q.HEAD_BYTES
) -> DataClient:
    """A client of the server at `endpoint`. answer_s: that an answer may take; largest: bytes of its largest piece, by
    default that of an answer without arrays."""

    def open_connection(seconds: float) -> Connection:
        by = time.monotonic() + seconds
        with closing(sockets.asking(endpoint, q.TICKET_BYTES)) as asking:
            asking.ask([b""])
            answer = asking.receive(seconds)
        left = by - time.monotonic()
        if answer is None or left < _LEAST_S:
            raise TimeoutError(f"no ticket has come for {seconds:g} s")
        if len(answer) != 2 or answer[0]:
            raise ConnectionError(bytes(answer[0]).decode(errors="replace"))
        address = urlsplit(endpoint).hostname
        assert address is not None, "an endpoint has an address"
        try:
            return connect(address, _decode_ticket(answer[1]), largest, left)
        except ValueError as error:
            raise ConnectionError(f"no ticket came: {error}") from error

    return DataClient(host, open_connection, answer_s)
