"""The least that a link asks for: a plain tcp socket that answers 8 bytes (how many) with so many bytes.

`python -m polyrhythm_bench.harness.raw_tcp ADDRESS` listens there until its standard input ends, and says its port.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: Bytes that the answering end holds, and the most that it sends at once.
_HELD = 64 * 2**20
_DEADLINE_S = 60.0


class RawEnd:
    """The asking end. room: where answers are received, as in a batch or a block."""

    def __init__(self, connection: socket.socket, room: int) -> None:
        self._connection, self.room = connection, memoryview(bytearray(room))

    def begin(self, nbytes: int) -> None:
        self._connection.sendall(nbytes.to_bytes(8, "little"))

    def receive(self, nbytes: int) -> None:
        """Receive an answer into `room`, from its start."""
        done = 0
        while done < nbytes:
            count = self._connection.recv_into(self.room[done:nbytes])
            if count == 0:
                raise ConnectionError("the other end has closed the bare connection")
            done += count

    def fetch(self, nbytes: int) -> None:
        """Ask for bytes and receive them."""
        self.begin(nbytes)
        self.receive(nbytes)


@contextmanager
def raw_end(address: str, prefix: Sequence[str], room: int) -> Iterator[RawEnd]:
    """A connection to an answering end that is started with these words before its command."""
    command = [*prefix, sys.executable, "-m", __name__, address]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
    try:
        assert popen.stdout is not None
        port = int(popen.stdout.readline())
        with socket.create_connection((address, port), _DEADLINE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield RawEnd(connection, room)
    finally:
        assert popen.stdin is not None
        assert popen.stdout is not None
        popen.stdin.close()
        popen.wait(_DEADLINE_S)
        popen.stdout.close()


def main() -> None:
    """Answer until standard input ends."""
    with socket.create_server((sys.argv[1], 0)) as listening:
        sys.stdout.write(f"{listening.getsockname()[1]}\n")
        sys.stdout.flush()
        threading.Thread(target=_answer, args=(listening,), daemon=True).start()
        sys.stdin.read()


def _answer(listening: socket.socket) -> None:
    held = memoryview(bytes(_HELD))
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while question := connection.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(question, "little")
        while left:
            part = held[: min(left, _HELD)]
            connection.sendall(part)
            left -= len(part)


if __name__ == "__main__":
    main()
