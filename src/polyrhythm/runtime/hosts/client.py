"""Asks the server of another host. One connection for each process and host; threads take turns."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.transport.exchange import AskingEnd
from polyrhythm.runtime.transport.sockets import Sockets


class HostSilent(ConnectionError, LookupError):
    """A host did not answer in time."""


class DataClient:
    """Questions to the server of `host`. connect: opens a connection to it."""

    def __init__(self, host: str, connect: Callable[[], AskingEnd], answer_s: float = q.ANSWER_S) -> None:
        self.host = host
        self._connect, self._answer_s = connect, answer_s
        self._end: AskingEnd | None = None
        self._numbers = itertools.count()
        self._turn = threading.Lock()

    def ask(self, question: q.Question) -> list[memoryview]:
        """The pieces of the answer. LookupError: there is none. HostSilent: none came in time."""
        (answer,) = self.ask_all([question])
        return answer

    def ask_all(self, questions: Iterable[q.Question], ahead: int = 1) -> Iterator[list[memoryview]]:
        """The answers in order; up to `ahead` questions are on their way at a time."""
        with self._turn:
            end = self._end = self._end or self._connect()
            waiting: deque[bytes] = deque()
            try:
                for question in questions:
                    if len(waiting) == ahead:
                        yield self._receive(end, waiting.popleft())
                    waiting.append(next(self._numbers).to_bytes(8, "little"))
                    end.ask([waiting[-1], q.encode(question)])
                while waiting:
                    yield self._receive(end, waiting.popleft())
            except BaseException:
                self._drop()  # answers that are on their way would be taken for later ones' otherwise
                raise

    def _receive(self, end: AskingEnd, number: bytes) -> list[memoryview]:
        answer = end.receive(self._answer_s)
        if answer is None:
            raise HostSilent(f"host {self.host} has not answered for {self._answer_s:g} s")
        if len(answer) < 2 or answer[0] != number:
            raise HostSilent(f"host {self.host} answers another question")
        if refused := bytes(answer[1]):
            raise LookupError(f"host {self.host}: {refused.decode(errors='replace')}")
        return answer[2:]

    def _drop(self) -> None:
        if self._end is not None:
            self._end.close()
            self._end = None

    def close(self) -> None:
        """End the connection."""
        with self._turn:
            self._drop()


def client_of(
    sockets: Sockets, host: str, endpoint: str, answer_s: float = q.ANSWER_S, largest: int = q.HEAD_BYTES
) -> DataClient:
    """A client of the server at `endpoint`. answer_s: that an answer may take; largest: bytes of its largest piece, by
    default that of an answer without arrays."""
    return DataClient(host, partial(sockets.asking, endpoint, largest), answer_s)
