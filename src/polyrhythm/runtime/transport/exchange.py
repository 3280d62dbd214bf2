"""Questions and answers over tcp: who asks sends messages of several parts and gets some back, in order. Large answers
between hosts come over other connections (`plugins.cluster.transport.sealed`).

Sockets are made by `runtime.transport.sockets`, with the run's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq


class AnsweringEnd:
    """Receives questions from all who have the run's keys. endpoint: where."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.endpoint: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, seconds: float) -> tuple[bytes, list[bytes]] | None:
        """Who asks, and the parts of the question; None if none comes in time."""
        if not self.socket.poll(round(seconds * 1000)):
            return None
        who, *parts = self.socket.recv_multipart()
        return who, parts

    def answer(self, who: bytes, parts: Sequence[Any]) -> None:
        """Send these parts, bytes or arrays, which must not change afterwards."""
        self.socket.send_multipart([who, *parts], copy=False)

    def close(self, linger_s: float = 0.0) -> None:
        """What is not sent within `linger_s` is lost."""
        self.socket.close(round(linger_s * 1000))


class AskingEnd:
    """A connection to an `AnsweringEnd`."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def ask(self, parts: Sequence[bytes]) -> None:
        self._socket.send_multipart(parts)

    def receive(self, seconds: float) -> list[memoryview] | None:
        """The parts of the next answer, where they were received; None if none comes in time."""
        if not self._socket.poll(round(seconds * 1000)):
            return None
        return [memoryview(part.buffer) for part in self._socket.recv_multipart(copy=False)]

    def close(self) -> None:
        self._socket.close(0)
