"""Inboxes and outboxes over ZeroMQ. Whoever works has one inbox; everybody may hold an outbox to it.

Queues have no limit of their own: the protocol bounds them (one request a slot, one batch a generator, one update).
Sending never blocks, and an outbox may be used from several threads: they take turns, so what arrives is in the order
in which it was handed over, whoever did so.

Over tcp both ends prove by keys that they belong to the run (`runtime.transport.authentication`). Over ipc the kernel
sees to it: the sockets lie in a folder that nobody but this user can enter.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import resource
import stat
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import zmq

from polyrhythm.errors import StartError
from polyrhythm.runtime.transport.authentication import Authenticator, RunKeys, new_socket, prove

#: Times the largest message that is read, above which a connection is cut off.
_CUT_OFF = 4
#: Ports of a host; bytes of a path that the kernel takes for a socket's, with the one that ends it.
_PORTS, _PATH = 2**16, 108
#: Files, and sockets, that a process of a run may have open.
_FILES = 2**14
#: Milliseconds between two probes of a connection over which nothing else comes.
_PROBE_MS = 2000
#: The address of this machine that no other can reach.
LOOPBACK = "127.0.0.1"
Transport = Literal["inproc", "ipc", "tcp"]
#: Raised where a thread waits for a message while another closes the process's sockets.
SocketsClosed = zmq.ContextTerminated


def endpoint(transport: Transport, folder: str, name: str, address: str = LOOPBACK) -> str:
    """Where an inbox of this name is bound; tcp takes any free port of this address."""
    if transport == "tcp":
        return f"tcp://{address}:*"
    return f"ipc://{folder}/{name}" if transport == "ipc" else f"inproc://{folder}/{name}"


class Inbox:
    """Receives from everybody whom the authenticator admits, in order for each sender. StartError: it cannot be bound.

    largest: bytes of a message; who sends a larger one is cut off.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        authenticator: Authenticator | None = None,
        largest: int = -1,
    ) -> None:
        self.socket = _bound(context, zmq.PULL, address, authenticator, largest)
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
    """Sends to the inbox at `address`, from any thread. keys: those of the run, where the inbox asks for them."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RunKeys | None = None) -> None:
        self._turn = threading.Lock()
        self._socket = new_socket(context, zmq.PUSH)
        self._socket.set_hwm(0)
        if keys is not None:
            prove(self._socket, keys)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise

    def send(self, message: bytes) -> None:
        """Hand the message over; it is copied, and sent by a thread of ZeroMQ's."""
        with self._turn:
            self._socket.send(message)

    def close(self, linger_s: float = 0.0) -> None:
        """What is not sent within `linger_s` is lost."""
        with self._turn:
            self._socket.close(round(linger_s * 1000))


class Sockets:
    """Opens the inboxes and outboxes of one process. folder: of the run, where ipc has its addresses; keys: of the run,
    needed over tcp; on_stranger: called for each connection that was refused, from another thread; largest: bytes of a
    message that is read. What is somewhat larger arrives, so that it can be counted. address: of this machine, by which
    the run's other hosts reach it over tcp; the default for one host is reached by no other.

    StartError: others than this user can enter the folder.
    """

    def __init__(
        self,
        transport: Transport,
        folder: str,
        keys: RunKeys | None,
        on_stranger: Callable[[], None],
        largest: int,
        *,
        address: str = LOOPBACK,
    ) -> None:
        assert keys is not None or transport != "tcp", "tcp without keys lets in everybody"
        self.transport, self.folder, self.keys, self.address = transport, folder, keys, address
        self._largest = _CUT_OFF * largest
        if transport == "ipc":
            found, own = Path(folder).stat(), os.getuid()
            if found.st_uid != own or stat.S_IMODE(found.st_mode) & 0o077:
                raise StartError(
                    f"{folder} = {stat.S_IMODE(found.st_mode):o}, user {found.st_uid}: others can reach this run's "
                    f"sockets there; make it a folder of user {own} with mode 700"
                )
        raise_file_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _FILES)
        self._authenticator = Authenticator(self._context, keys, on_stranger) if keys is not None else None

    def inbox(self, name: str) -> Inbox:
        address = endpoint(self.transport, self.folder, name, self.address)
        return Inbox(self._context, address, self._authenticator, self._largest)

    def outbox(self, address: str) -> Outbox:
        return Outbox(self._context, address, self.keys)

    def answering(self, largest: int, port: int | None = None) -> AnsweringEnd:
        """Where questions are received, of at most `largest` bytes each, over tcp. port: None for any free one; at
        a given one, connections are probed. StartError: it cannot be bound."""
        assert self._authenticator is not None, "questions come over tcp"
        address, probes = f"tcp://{self.address}:{'*' if port is None else port}", port is not None
        return AnsweringEnd(_bound(self._context, zmq.ROUTER, address, self._authenticator, largest, probes=probes))

    def ask(self, address: str, parts: Sequence[bytes], seconds: float, largest: int) -> list[bytes] | None:
        """The parts of the answer to one question, of at most `largest` bytes each; None if none comes in time."""
        assert self.keys is not None, "questions go over tcp"
        with closing(new_socket(self._context, zmq.DEALER)) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.set(zmq.MAXMSGSIZE, largest)
            prove(socket, self.keys)
            socket.connect(address)
            socket.send_multipart(parts)
            return socket.recv_multipart() if socket.poll(round(seconds * 1000)) else None

    def could_be(self, address: str) -> bool:
        if self.transport == "tcp":
            found = re.fullmatch(r"tcp://([0-9.]{7,15}):([1-9][0-9]{0,4})", address)
            if found is None or int(found[2]) >= _PORTS:
                return False
            if self.address == LOOPBACK:
                return found[1] == LOOPBACK
            try:
                return bool(ipaddress.IPv4Address(found[1]))
            except ValueError:
                return False
        begin = f"ipc://{self.folder}/"
        short = len(address.encode(errors="replace")) < len("ipc://") + _PATH
        return short and address.startswith(begin) and address.isprintable() and "/" not in address.removeprefix(begin)

    @property
    def closed(self) -> bool:
        return self._context.closed

    def close(self, *, unsent: bool = False) -> None:
        """End the authentication and the context, with all that is still open; unsent: what lingers is waited for."""
        if self._authenticator is not None:
            self._authenticator.close()
        if unsent:
            self._context.term()
        else:
            self._context.destroy(linger=0)


def wait_for(sockets: Sequence[Any], seconds: float) -> None:
    """Wait until something has come to one of these ZeroMQ sockets or file descriptors, `seconds` at most."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    poller.poll(round(seconds * 1000))


def probe(socket: zmq.Socket[bytes]) -> None:
    """Have its connections given up that do not answer; ZeroMQ's own thread sees to it."""
    socket.set(zmq.HEARTBEAT_IVL, _PROBE_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 3 * _PROBE_MS)


def _bound(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: str,
    authenticator: Authenticator | None,
    largest: int,
    *,
    probes: bool = False,
) -> zmq.Socket[bytes]:
    """A socket that is bound there. StartError: it cannot be."""
    socket = new_socket(context, kind)
    socket.set_hwm(0)
    socket.set(zmq.MAXMSGSIZE, largest)
    if probes:  # who is connected may vanish with its machine
        probe(socket)
    try:
        if authenticator is not None:
            authenticator.guard(socket)
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise StartError(
            f"the address {address} cannot be had ({error.strerror}); free it, or choose another data_plane.transport, "
            "or join.port"
        ) from error
    return socket


def raise_file_limit() -> float:
    """Raise the limit of open files of this process to what its sockets may need, or as far as allowed; the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return math.inf if soft == resource.RLIM_INFINITY else soft


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
