"""A tcp connection that a test can break: what comes to `port` goes on to another one, while the link is up."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator


def free_port() -> int:
    """A port that is free, and that the system does not give to others: below those that it gives itself."""
    while True:
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            return int(found.getsockname()[1])


class Link:
    """Forwards to `target`; `broken` while it refuses connections."""

    def __init__(self, target: int) -> None:
        self.broken = False
        self.connections = 0
        self._target, self._open = target, set[socket.socket]()
        self._turn = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target), 5)
            except OSError:
                near.close()
                continue
            with self._turn:
                if self.broken:
                    near.close()
                    far.close()
                    continue
                self.connections += 1
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                sink.sendall(content)
        for end in (source, sink):
            self._end(end)

    def _end(self, end: socket.socket) -> None:
        with self._turn:
            if end in self._open:
                self._open.remove(end)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def cut(self, *, stays: bool = False) -> None:
        """Break what is connected now. stays: and refuse what comes, until `broken` is cleared."""
        with self._turn:
            self.broken, ends = stays, list(self._open)
        for end in ends:
            self._end(end)

    def close(self) -> None:
        self._listening.close()
        self.cut()


@contextlib.contextmanager
def link_to(target: int) -> Iterator[Link]:
    link = Link(target)
    try:
        yield link
    finally:
        link.close()
