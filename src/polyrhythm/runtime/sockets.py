"""Inboxes and outboxes over ZeroMQ. Whoever works has one inbox; everybody may hold an outbox to it.

Queues have no limit of their own: the protocol bounds them (one request a slot, one batch a generator, one update).
Sending never blocks, and an outbox may be used from several threads: they take turns, so what arrives is in the order
in which it was handed over, whoever did so.
"""

from __future__ import annotations

import threading
from typing import Literal

import zmq

from polyrhythm.errors import StartError

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
        self._timeout = -1

    def receive(self, seconds: float = 0.0) -> bytes | None:
        """The next message; None if none has come within `seconds`."""
        socket, milliseconds = self.socket, round(seconds * 1000)
        if milliseconds <= 0:
            if not socket.get(zmq.EVENTS):  # there is but one event: a PULL socket never sends
                return None
        elif milliseconds != self._timeout:
            socket.set(zmq.RCVTIMEO, milliseconds)
            self._timeout = milliseconds
        try:
            return socket.recv()
        except zmq.Again:
            return None

    def close(self) -> None:
        self.socket.close(0)


class Outbox:
    """Sends to the inbox at `address`, from any thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._turn = threading.Lock()
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)

    def send(self, message: bytes) -> None:
        """Hand the message over; it is copied, and sent by a thread of ZeroMQ's."""
        with self._turn:
            self._socket.send(message)

    def close(self, linger_s: float = 0.0) -> None:
        """What is not sent within `linger_s` is lost."""
        with self._turn:
            self._socket.close(round(linger_s * 1000))
