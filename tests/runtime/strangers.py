"""Processes' sockets that do not belong to a run, and how they try to speak to one of its inboxes over tcp."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import zmq

from polyrhythm.runtime.transport.authentication import RunKeys, make_keys, prove

#: What comes instead of ZeroMQ's greeting.
_RAW = (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03", b"x" * 5000)
WAYS = ("raw", "no keys", "wrong inbox key", "the inbox's public key")


class Stranger:
    """Speaks to `address` in one of `WAYS`; keys: of the run, of which it knows no more than the way says."""

    def __init__(self, way: str, address: str, keys: RunKeys) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._raw: list[socket.socket] = []
        self._sockets: list[zmq.Socket[bytes]] = []
        if way == "raw":
            host, _, port = address.removeprefix("tcp://").partition(":")
            for content in _RAW:
                self._raw.append(socket.create_connection((host, int(port)), 5))
                self._raw[-1].sendall(content)
            return
        own = make_keys()
        pushing = self._context.socket(zmq.PUSH)
        self._sockets.append(pushing)
        if way == "wrong inbox key":
            prove(pushing, own)
        if way == "the inbox's public key":
            prove(pushing, RunKeys(keys.inbox, own.outbox))
        pushing.connect(address)

    def say(self, contents: Sequence[bytes]) -> None:
        for pushing in self._sockets:
            for content in contents:
                pushing.send(content)

    def close(self) -> None:
        for raw in self._raw:
            raw.close()
        self._context.destroy(linger=0)
