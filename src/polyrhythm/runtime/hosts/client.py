"""Asks the server of another host. One connection for each process and host; threads take turns."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import zmq

from polyrhythm.runtime.hosts import questions as q

#: Seconds that an answer may take: an answer is read from memory, so the rest is the link's.
ANSWER_S = 20.0


class HostSilent(ConnectionError):
    """A host did not answer in time."""


class DataClient:
    """Questions to the server of `host`. connect: opens a connection to it."""

    def __init__(self, host: str, connect: Callable[[], zmq.Socket[bytes]], answer_s: float = ANSWER_S) -> None:
        self.host = host
        self._connect, self._answer_s = connect, answer_s
        self._socket: zmq.Socket[bytes] | None = None
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def ask(self, question: q.Question) -> list[memoryview]:
        """The pieces of the answer. LookupError: there is none. HostSilent: none came in time."""
        (answer,) = self.ask_all([question])
        return answer

    def ask_all(self, questions: Iterable[q.Question], ahead: int = 1) -> Iterator[list[memoryview]]:
        """The answers in order; up to `ahead` questions are on their way at a time."""
        with self._turn:
            socket = self._socket = self._socket or self._connect()
            waiting: deque[bytes] = deque()
            try:
                for question in questions:
                    if len(waiting) == ahead:
                        yield self._receive(socket, waiting.popleft())
                    waiting.append(next(self._numbers).to_bytes(8, "little"))
                    socket.send_multipart([waiting[-1], q.encode(question)])
                while waiting:
                    yield self._receive(socket, waiting.popleft())
            except BaseException:
                self._drop()  # answers that are on their way would be taken for later ones' otherwise
                raise

    def _receive(self, socket: zmq.Socket[bytes], number: bytes) -> list[memoryview]:
        if not socket.poll(round(self._answer_s * 1000)):
            raise HostSilent(f"host {self.host} has not answered for {self._answer_s:g} s")
        head, refused, *pieces = socket.recv_multipart(copy=False)
        if head.bytes != number:
            raise HostSilent(f"host {self.host} answers another question")
        if refused.bytes:
            raise LookupError(f"host {self.host}: {refused.bytes.decode(errors='replace')}")
        return [piece.buffer for piece in pieces]

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
            self._socket = None

    def close(self) -> None:
        """End the connection."""
        with self._turn:
            self._drop()
