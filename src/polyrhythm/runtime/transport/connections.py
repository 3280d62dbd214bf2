"""Bounds the connections of one inbox that have not proven the run's keys, and counts those of strangers."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

#: Unproven connections of an inbox; with one more the oldest is ended.
MOST_UNPROVEN = 64
#: Bytes that ZeroMQ sends before it has a proof, a greeting and a WELCOME (RFC 23, 26), with some to spare; more bytes
#: than a proof takes.
_UNPROVEN, _PROOF = 64 + 170 + 6, 4096
#: Where the kernel's counts of a connection begin: bytes that the other end has acknowledged, bytes received.
_COUNTS = 120


class Connections:
    """The open connections of one inbox by file descriptor, to count those that lack the run's keys (strangers).

    A connection that ends before it has proven its keys was a stranger's; ZeroMQ reports no failed handshake for one
    that sends garbage. ZeroMQ does not report which connection a proof belongs to (its value is 0). The kernel's counts
    do (`look`). Before that all are proven once there are as many proofs as connections, and one that ends uses up a
    proof: of connections that end so early the count of strangers may be too low.
    """

    def __init__(self) -> None:
        self._port = 0
        self._unproven: dict[int, None] = {}  # the oldest first
        self._ended: set[int] = set()
        self._proofs = 0  # of connections in `_unproven`; below 0 where some are still to be reported

    def accept(self, connection: int, port: int = 0) -> None:
        """A connection to this port is open; descriptors of ended ones are used again."""
        self._unproven[connection], self._port = None, port

    @property
    def unproven(self) -> int:
        """Open connections that may still have to prove their keys."""
        return len(self._unproven)

    def look(self, *, whole: bool) -> None:
        """Ask the kernel about them: forget the proven ones, end those that have sent more than a proof takes, and the
        oldest of too many. whole: about all, not only about as many as are too many."""
        for connection in list(self._unproven):
            if not whole and self.unproven <= MOST_UNPROVEN:
                break
            with _second_descriptor(connection, self._port) as found:
                sent, received = _crossed(found) if found is not None else (0, 0)
                if found is None or not sent:  # it has just begun or ended, or this system does not count
                    continue
                if sent > _UNPROVEN:
                    del self._unproven[connection]
                    self._proofs -= 1
                elif received > _PROOF or self.unproven > MOST_UNPROVEN:
                    del self._unproven[connection]
                    self._ended.add(connection)
                    found.shutdown(socket.SHUT_RDWR)  # ZeroMQ then closes it

    def prove(self) -> None:
        """One of the connections has the run's keys."""
        self._proofs += 1
        self._settle()

    def is_stranger(self, connection: int) -> bool:
        """A connection has ended: whether it was certainly a stranger's."""
        if connection in self._ended:
            self._ended.remove(connection)
            return True
        if connection not in self._unproven:
            return False
        del self._unproven[connection]
        stranger = self._proofs <= 0
        self._proofs -= not stranger
        self._settle()
        return stranger

    def _settle(self) -> None:
        if self._proofs >= len(self._unproven):
            self._unproven.clear()
            self._proofs = 0


@contextlib.contextmanager
def _second_descriptor(connection: int, port: int) -> Iterator[socket.socket | None]:
    """A connection to this port, by a duplicate descriptor; None if the descriptor has another owner by now."""
    with contextlib.ExitStack() as stack:
        found = None
        with contextlib.suppress(OSError):
            descriptor = os.dup(connection)
            try:
                found = stack.enter_context(socket.socket(fileno=descriptor))
            except OSError:  # it is a file of another by now
                os.close(descriptor)
                raise
            if found.getsockname()[1:2] != (port,):
                found = None
        with contextlib.suppress(OSError):
            yield found


def _crossed(connection: socket.socket) -> tuple[int, int]:
    """Bytes of a connection that the other end has acknowledged, and bytes received; 0, 0 if the system counts none."""
    if not hasattr(socket, "TCP_INFO"):
        return 0, 0
    counts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS + 16)
    return struct.unpack_from("=QQ", counts, _COUNTS) if len(counts) == _COUNTS + 16 else (0, 0)
