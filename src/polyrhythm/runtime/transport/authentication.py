"""Authentication of a run's tcp sockets by CURVE keys that are made for the run and never leave its processes.

An inbox proves its identity with the run's inbox key, an outbox with the run's outbox key; messages are encrypted.
CURVE alone admits everyone who knows the inbox's public key. So each process with an inbox has a thread that ZeroMQ
asks at every handshake (ZAP, RFC 27) and that accepts only the run's outbox key; without its answer a connection is
refused. It also ends connections that do not come to a proof, so that strangers cannot take the process's
descriptors and memory. The thread works only at handshakes; each message costs its encryption.

Invariant: the unproven connections of an inbox are few (`connections.MOST_UNPROVEN`), last `_HANDSHAKE_MS` at most, and
have sent little.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from polyrhythm.errors import StartError

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
        self._forget_proven()

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
        self._forget_proven()
        return stranger

    def _forget_proven(self) -> None:
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


Context = zmq.Context[zmq.Socket[bytes]]

#: Address at which ZeroMQ asks in each context; domain of the inboxes (without one ZeroMQ does not ask).
_ZAP, _DOMAIN = "inproc://zeromq.zap.01", b"polyrhythm"
_ACCEPT, _REFUSE = (b"200", b"OK"), (b"400", b"not a key of this run")
#: Requests of the thread's own process, beside those of ZeroMQ.
_WATCH, _LEAVE = b"watch", b"leave"
#: Milliseconds within which the thread answers its own process.
_ANSWER_MS = 5000
#: Milliseconds within which a connection has to prove its keys, and between two looks at those that have not yet.
_HANDSHAKE_MS, _LOOK_MS = 10_000, 100
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes = field(repr=False)
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run: of all inboxes, and of all outboxes. Never shown, written or logged."""

    inbox: KeyPair
    outbox: KeyPair


def new_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    """A socket of this kind. OSError: this process may open no more files."""
    try:
        return context.socket(kind)
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


def make_keys(*, has_curve: bool = zmq.has("curve")) -> RunKeys:
    """New keys. StartError: this ZeroMQ was built without CURVE."""
    if not has_curve:
        raise StartError(
            "data_plane.transport = tcp: the installed pyzmq was built without CURVE, so any process could command the "
            "run; set data_plane.transport=ipc, or install a pyzmq wheel from PyPI"
        )
    return RunKeys(KeyPair(*zmq.curve_keypair()), KeyPair(*zmq.curve_keypair()))


def prove(socket: zmq.Socket[bytes], keys: RunKeys) -> None:
    """Give a socket the run's keys, before it connects to an inbox."""
    socket.curve_serverkey = keys.inbox.public
    socket.curve_publickey, socket.curve_secretkey = keys.outbox.public, keys.outbox.secret


class Authenticator:
    """Admits connections with the run's keys to the inboxes of one process. on_stranger: called from its thread for
    each connection that was refused."""

    def __init__(self, context: Context, keys: RunKeys, on_stranger: Callable[[], None]) -> None:
        self._context, self._keys, self._on_stranger = context, keys, on_stranger
        self._accepted = z85.decode(keys.outbox.public)
        self._numbers = itertools.count()
        self._requests = new_socket(context, zmq.REP)
        self._requests.bind(_ZAP)
        self._asking, self._turn = new_socket(context, zmq.REQ), threading.Lock()
        self._asking.set(zmq.RCVTIMEO, _ANSWER_MS)
        self._asking.connect(_ZAP)
        self._watched: dict[zmq.Socket[bytes], Connections] = {}
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="authenticator", daemon=True)
        self._thread.start()

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make an inbox's socket admit the run's keys only. Call it before the socket is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._keys.inbox.secret
        socket.zap_domain = _DOMAIN
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        address = f"inproc://handshakes-{next(self._numbers)}"
        socket.monitor(address, _EVENTS)
        self._request(_WATCH, address.encode())

    def close(self) -> None:
        """End the thread; the context can be terminated afterwards. A second call does nothing."""
        if self._thread.is_alive():
            self._request(_LEAVE)
            self._thread.join()
        self._asking.close(0)

    def _request(self, *words: bytes) -> None:
        with self._turn:
            self._asking.send_multipart(words)
            self._asking.recv()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        """Consumes: ZeroMQ's requests, news of connections, what its process tells it. Waits for: any of them, and the
        next look at unproven connections. Unblocked by: these. Produces: answers, the end of connections that do not
        come to a proof, and a call for each stranger. Ends when told to, or with the context."""
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        try:
            present = True
            while present:
                for socket, _ in poller.poll(_LOOK_MS if self._look() else None):
                    if socket is self._requests:
                        present = self._answer(poller)
                    else:
                        self._on_monitor_event(socket, poller)
        except zmq.ContextTerminated:
            pass
        finally:
            for socket in (self._requests, *self._watched):
                socket.close(0)

    def _answer(self, poller: zmq.Poller) -> bool:
        """One request; False if it is the last."""
        words = self._requests.recv_multipart()
        if words[0] == _LEAVE:
            self._requests.send(b"")
            return False
        if words[0] == _WATCH:
            news = new_socket(self._context, zmq.PAIR)
            news.connect(words[1].decode())
            poller.register(news, zmq.POLLIN)
            self._watched[news] = Connections()
            self._requests.send(b"")
            return True
        version, sequence, _, _, _, mechanism, *credentials = words
        known = mechanism == b"CURVE" and credentials == [self._accepted]
        self._requests.send_multipart([version, sequence, *(_ACCEPT if known else _REFUSE), b"", b""])
        return True

    def _look(self) -> bool:
        """Look at the unproven connections where that is due; whether there are any."""
        awaited = [connections for connections in self._watched.values() if connections.unproven]
        due = time.monotonic() >= self._next_look
        if awaited and due:
            self._next_look = time.monotonic() + _LOOK_MS / 1000
        for connections in awaited:
            connections.look(whole=due)
        return any(connections.unproven for connections in awaited)

    def _on_monitor_event(self, news: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        message = recv_monitor_message(news)
        event, connection = message["event"], message["value"]
        if event == zmq.EVENT_ACCEPTED:
            self._watched[news].accept(connection, port=int(message["endpoint"].rpartition(b":")[2]))
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._watched[news].prove()
        elif event == zmq.EVENT_MONITOR_STOPPED:
            poller.unregister(news)
            self._watched.pop(news)
            news.close(0)
        elif self._watched[news].is_stranger(connection):
            self._on_stranger()
