"""Inboxes and outboxes over ZeroMQ. Whoever works has one inbox; everybody may hold an outbox to it.

Queues have no limit of their own: the protocol bounds them (one request a slot, one batch a generator, one update).
Sending never blocks, and an outbox may be used from several threads: each gets a socket of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Literal

import zmq

from polyrhythm.errors import StartError
from polyrhythm.runtime.wire import Frame

Transport = Literal["inproc", "ipc", "tcp"]


def endpoint(transport: Transport, folder: str, name: str) -> str:
    """Where an inbox of this name is bound; tcp takes any free port of this machine."""
    if transport == "tcp":
        return "tcp://127.0.0.1:*"
    return f"ipc://{folder}/{name}" if transport == "ipc" else f"inproc://{folder}/{name}"


class Inbox:
    """Receives from anybody, in order for each sender. StartError: it cannot be bound."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close(0)
            raise StartError(
                f"the address {address} cannot be had ({error.strerror}); "
                "free it, or choose another data_plane.transport"
            ) from error
        self.endpoint: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self) -> list[bytes] | None:
        """The frames of the next message; None if none has come."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> bool:
        """Until a message has come; False if none came in time."""
        return bool(self.socket.poll(max(0, round(seconds * 1000))))

    def close(self) -> None:
        self.socket.close(0)


class Outbox:
    """Sends to the inbox at `address`, from any thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._context, self._address = context, address
        self._own = threading.local()
        self._sockets: list[zmq.Socket[bytes]] = []

    def send(self, frames: Sequence[Frame]) -> None:
        """Hand the frames over; they are copied, and sent by a thread of ZeroMQ's."""
        socket = getattr(self._own, "socket", None)
        if socket is None:
            socket = self._own.socket = self._connect()
        socket.send_multipart(frames)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.set_hwm(0)
        socket.connect(self._address)
        self._sockets.append(socket)
        return socket

    def close(self, linger_s: float = 0.0) -> None:
        """What is not sent within `linger_s` is lost."""
        for socket in self._sockets:
            socket.close(round(linger_s * 1000))
