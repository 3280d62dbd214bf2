"""One connection of a simulator to a run's join port, and how far it has come.

    opening → proven → broken            the run knows the token; later the connection ends
    opening → refused                    the run, or whoever answers there, does not know the token
    opening → broken                     nobody answers there

A broken connection is not repaired: whoever has it opens another, so that what is sent twice is known to both.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from polyrhythm.runtime.transport.authentication import RunKeys, prove
from polyrhythm.runtime.transport.sockets import probe

#: Milliseconds for a connection, and for its handshake.
_CONNECT_MS = 3000
#: Milliseconds until ZeroMQ would repair a connection.
_NEVER_MS = 24 * 3600 * 1000
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
_EVENTS = _REFUSED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

State = Literal["opening", "proven", "refused", "broken"]


class JoinLine:
    """A connection to `address`. state: how far it has come, as of the last `update`; largest: bytes of a message that
    is read."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: RunKeys, largest: int) -> None:
        self.address, self.state = address, "opening"
        self._connected = False
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.set(zmq.MAXMSGSIZE, largest)
        socket.set(zmq.RECONNECT_IVL, _NEVER_MS)  # with -1, what had come before the break would be lost
        socket.set(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        socket.set(zmq.HANDSHAKE_IVL, _CONNECT_MS)
        probe(socket)
        prove(socket, keys)
        self.socket = socket
        self.monitor: Any = socket.get_monitor_socket(_EVENTS)
        socket.connect(address)

    def update(self) -> State:
        """Take what has become known of the connection."""
        while self.monitor.get(zmq.EVENTS) & zmq.POLLIN:
            event = cast(int, recv_monitor_message(self.monitor)["event"])
            if event == zmq.EVENT_CONNECTED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.state = "proven"
            elif event & _REFUSED or (event & _ENDED and self._connected and self.state == "opening"):
                self.state = "refused"
            elif event & _ENDED and self.state != "refused":
                self.state = "broken"
        state: State = self.state  # type: ignore[assignment]
        return state

    def send(self, frame: bytes, linger_s: float = 0.0) -> None:
        """Hand a frame over. linger_s: for which `close` waits until it is sent."""
        self.socket.set(zmq.LINGER, round(linger_s * 1000))
        self.socket.send(frame)

    def receive(self) -> memoryview | None:
        """A frame that has come, or None."""
        if not cast(int, self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            return None
        first, *others = self.socket.recv_multipart(copy=False)
        return memoryview(first.buffer) if not others else memoryview(b"")

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class Lines:
    """Opens the connections of one process, with the token's `keys`; each as `JoinLine`."""

    def __init__(self, keys: RunKeys, largest: int) -> None:
        self._keys, self._largest = keys, largest
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open(self, address: str) -> JoinLine:
        return JoinLine(self._context, address, self._keys, self._largest)

    def close(self, linger_s: float) -> None:
        """What is not sent within `linger_s` is lost."""
        self._context.destroy(linger=round(linger_s * 1000))
