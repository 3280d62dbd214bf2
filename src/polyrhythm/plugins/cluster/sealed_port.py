"""A tcp port for sealed connections: who brings a ticket is answered in a thread of its own, all others are refused.

Tickets are given by whoever has proven the run's keys elsewhere. A ticket is good once, for some seconds.

Invariant: a stranger has no thread, and at most `PortLimits.strangers` of them have a descriptor.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from polyrhythm.plugins.cluster.sealed import NAME, BrokenSeal, ConnectionTicket, SealedConnection, new_ticket
from polyrhythm.runtime.transport.drops import DropCounter

log = logging.getLogger(__name__)

#: Seconds without a word after which a connection is probed, between probes, and probes without an answer that end it.
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


@dataclass(frozen=True, slots=True)
class PortLimits:
    """connections: at a time, with the tickets that were given and not used. ticket_s: seconds for which a ticket is
    good, and within which a connection has to bring one. strangers: connections without a ticket so far; with one more
    the oldest is refused. pause_s, longest_pause_s: seconds for which no connection is accepted after this process had
    too many descriptors, at first and at most."""

    connections: int = 4096
    ticket_s: float = 10.0
    strangers: int = 64
    pause_s: float = 0.2
    longest_pause_s: float = 2.0


class SealedPort:
    """Any free port of `address`. serve: answers a connection, in its thread, until it ends; largest: bytes of a piece
    that is received; drops: counts what is refused. OSError: there is no port."""

    def __init__(
        self,
        address: str,
        serve: Callable[[SealedConnection], None],
        largest: int,
        drops: DropCounter,
        limits: PortLimits = PortLimits(),
    ) -> None:
        self._limits = limits
        self._serve, self._largest, self._drops = serve, largest, drops
        self._turn, self._over = threading.Lock(), threading.Event()
        self._tickets: dict[bytes, tuple[float, ConnectionTicket]] = {}
        self._open: dict[SealedConnection, threading.Thread] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}
        self._pause_s, self._pause_ends = 0.0, math.inf  # in which no connection is accepted
        self._listening = socket.create_server((address, 0), backlog=limits.strangers)
        self._listening.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._port: int = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="sealed-port", daemon=True)
        self._thread.start()

    def admit(self) -> ConnectionTicket:
        """A ticket for one connection. LookupError: there are as many as there may be."""
        now, ticket = time.monotonic(), new_ticket(self._port)
        with self._turn:
            self._tickets = {name: each for name, each in self._tickets.items() if each[0] > now}
            if len(self._open) + len(self._tickets) >= self._limits.connections:
                raise LookupError(f"{self._limits.connections} connections are open already")
            self._tickets[ticket.name] = now + self._limits.ticket_s, ticket
        return ticket

    def check(self) -> None:
        """RuntimeError: its thread has ended, by an error, and no connection is accepted."""
        if not self._thread.is_alive() and not self._over.is_set():
            raise RuntimeError("the thread that accepts connections has ended")

    def close(self) -> None:
        self._over.set()
        self._wake.close()
        self._thread.join()
        with self._turn:
            threads = list(self._open.values())
            for connection in self._open:
                connection.end()
        for thread in threads:
            thread.join()

    # ------------------------------------------------------------ its threads

    def _run(self) -> None:
        """Consumes: connections, and what they bring. Waits for: either, and the time by which they have to. Unblocked
        by: these, or `close`. Produces: a thread for each connection with a ticket. Ends when told to, with all that
        has none."""
        with selectors.DefaultSelector() as selector, self._listening, self._woken:
            for each in (self._listening, self._woken):
                selector.register(each, selectors.EVENT_READ)
            while not self._over.is_set():
                first, _ = next(iter(self._strangers.values()), (math.inf, b""))
                by = min(first, self._pause_ends)  # when something is to be done that nobody asks for
                for key, _ in selector.select(None if by == math.inf else max(0.0, by - time.monotonic())):
                    if key.fileobj is self._listening:
                        self._accept(selector)
                    elif key.fileobj in self._strangers:
                        self._receive_ticket(key.fileobj, selector)
                self._refuse_late(selector)
                if time.monotonic() >= self._pause_ends:
                    self._pause_ends = math.inf
                    selector.register(self._listening, selectors.EVENT_READ)
            for connection in self._strangers:
                connection.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listening.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError as error:
            if not self._pause_s:
                log.warning("no connection can be accepted: %s; trying again until one can", error)
            self._pause_s = min(2 * self._pause_s, self._limits.longest_pause_s) or self._limits.pause_s
            self._pause_ends = time.monotonic() + self._pause_s
            selector.unregister(self._listening)
            return
        if self._pause_s:
            log.info("connections are accepted again")
            self._pause_s = 0.0
        connection.setblocking(False)
        self._strangers[connection] = time.monotonic() + self._limits.ticket_s, b""
        selector.register(connection, selectors.EVENT_READ)

    def _receive_ticket(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        by, brought = self._strangers[connection]
        try:
            more = connection.recv(NAME - len(brought))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        self._strangers[connection] = by, brought + more
        if not more:
            self._refuse(connection, selector)
        elif len(brought + more) == NAME:
            with self._turn:
                good_until, ticket = self._tickets.pop(brought + more, (0.0, None))
            if ticket is None or good_until < time.monotonic():
                self._refuse(connection, selector)
            else:
                selector.unregister(connection)
                del self._strangers[connection]
                self._begin(connection, ticket)

    def _refuse_late(self, selector: selectors.BaseSelector) -> None:
        """Refuse those whose time is up, and the oldest of too many."""
        now = time.monotonic()
        for connection, (by, _) in list(self._strangers.items()):
            if by > now and len(self._strangers) <= self._limits.strangers:
                break
            self._refuse(connection, selector)

    def _refuse(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection)
        del self._strangers[connection]
        connection.close()
        self._drops.stranger()

    def _begin(self, connection: socket.socket, ticket: ConnectionTicket) -> None:
        """Start the thread that answers the connection."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _PROBES.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        sealed = SealedConnection(connection, ticket.answering, ticket.asking, self._largest)
        thread = threading.Thread(target=self._answer, args=(sealed,), name="sealed", daemon=True)
        with self._turn:
            self._open[sealed] = thread
            try:
                thread.start()
            except RuntimeError as error:  # there are too many threads
                log.warning("no connection can be answered: %s", error)
                del self._open[sealed]
                sealed.close()

    def _answer(self, connection: SealedConnection) -> None:
        """Consumes: what one connection asks. Waits for: the next question, and for who asks to take an answer.
        Unblocked by: these, their limits, the end of the connection, or `close`. Produces: answers. Ends with the
        connection, or with the first record that does not open."""
        try:
            self._serve(connection)
        except BrokenSeal as error:
            self._drops.drop("undecodable", str(error))
        except OSError as error:
            log.debug("a connection has ended: %s", error)
        finally:
            with self._turn:
                del self._open[connection]
            connection.close()
