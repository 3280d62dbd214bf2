"""A tcp connection whose two ends share keys that nobody else has: all that crosses is sealed with AES-256-GCM.

    record     bytes of the content (4 bytes), the sealed content, its tag (16 bytes)
    message    a record with the bytes of each piece (8 bytes each), then the pieces, each in records of its own

Each direction has a key, which is used for one connection. The nonce of a record is its number, and its length is
authenticated with it: what was changed, repeated, left out or moved does not open.

Invariant: a length is bounded before anything is allocated for it, and what has not been opened is given to nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from polyrhythm.errors import StartError

#: Bytes of a record's content at most; of what stands before and after it; of the record with the sizes.
RECORD, _LENGTH, _TAG, _HEAD = 2**18, 4, 16, 2**16
#: Pieces of a message at most.
MOST_PIECES = _HEAD // 8
#: Bytes of a buffer of a connection, and of those that are received though they may belong to the next record.
_BUFFER, _BEYOND = RECORD + 2**16, 2**14
#: Records under one key: 1 TiB, far below what AES-GCM allows.
_MOST_RECORDS = 2**40 // RECORD
_KEY, NAME = 32, 16
_Key = Annotated[bytes, msgspec.Meta(min_length=_KEY, max_length=_KEY)]


def check_sealing() -> None:
    """StartError: the package that seals is missing or too old."""
    try:
        from cryptography import __version__ as found
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        found = "none"
    else:
        if hasattr(AESGCM, "encrypt_into"):
            return
    raise StartError(
        f"cryptography = {found}: a run on several hosts needs version 47 or newer to encrypt what crosses between "
        "them; pip install 'cryptography>=47' there"
    )


#: Where the next piece of a message is received, by the pieces before it and its bytes: parts of memory that records
#: fill one after another, no record two of them; None for memory of its own.
Place = Callable[[Sequence[memoryview], int], Sequence[memoryview] | None]


def anywhere(before: Sequence[memoryview], size: int) -> None:
    """Each piece in memory of its own."""


class BrokenSeal(ConnectionError):
    """What came was not sealed by the other end, or not as the next record; or it is more than may come."""


@dataclass(frozen=True, slots=True)
class ConnectionTicket:
    """Admits one connection to a port. name: says which ticket it is; asking, answering: the keys of who connects and
    of the port's end."""

    port: Annotated[int, msgspec.Meta(ge=1, lt=2**16)]
    name: Annotated[bytes, msgspec.Meta(min_length=NAME, max_length=NAME)] = field(repr=False)
    asking: _Key = field(repr=False)
    answering: _Key = field(repr=False)


def new_ticket(port: int) -> ConnectionTicket:
    return ConnectionTicket(port, secrets.token_bytes(NAME), secrets.token_bytes(_KEY), secrets.token_bytes(_KEY))


def connect(address: str, ticket: ConnectionTicket, largest: int, seconds: float) -> SealedConnection:
    """The connection that a ticket is for. largest: bytes of a piece that is received. OSError: it cannot be had in
    time."""
    connection = socket.create_connection((address, ticket.port), seconds)
    try:
        connection.sendall(ticket.name)
        return SealedConnection(connection, ticket.asking, ticket.answering, largest)
    except BaseException:
        connection.close()
        raise


class SealedConnection:
    """One end. sends, receives: the keys of the two directions; largest: bytes of a piece that is received.

    One thread uses it at a time; `end` may be called from any. After an error it is of no use.
    """

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes, largest: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # the kernel limits each wait, see `_limit`
        self._socket, self._largest = connection, largest
        self._out, self._in = _Outgoing(connection, sends), _Incoming(connection, receives)
        self._head = np.empty(_HEAD, np.uint8).data

    @property
    def is_usable(self) -> bool:
        """Whether a question may be asked: nothing is here unasked, not even the end, and the keys are not worn out."""
        if max(self._out.records, self._in.records) > _MOST_RECORDS or self._in.is_filled:
            return False
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def send(self, pieces: Sequence[Any], seconds: float) -> None:
        """Send a message of at most `MOST_PIECES` pieces: bytes, arrays without gaps, lists of these, or what makes one
        byte when all before it was read. TimeoutError: the other end takes nothing for `seconds`. OSError: it is
        gone."""
        parts = [[_bytes_of(part) for part in (piece if isinstance(piece, list) else [piece])] for piece in pieces]
        sizes = [sum(1 if callable(part) else len(part) for part in piece) for piece in parts]
        with _limit(self._socket, socket.SO_SNDTIMEO, seconds):
            self._out.add(memoryview(struct.pack(f"<{len(sizes)}Q", *sizes)))
            for part in itertools.chain.from_iterable(parts):
                content = memoryview(part()) if callable(part) else part
                for begin in range(0, len(content), RECORD):
                    self._out.add(content[begin : begin + RECORD])
            self._out.flush()

    def receive(self, seconds: float, place: Place = anywhere) -> list[memoryview]:
        """The pieces of the next message, each in memory of its own; or in that which `place` gives for it, and then
        it is empty here. TimeoutError: it has not come in time. OSError: nothing more will come. BrokenSeal: it was
        changed, or is too large."""
        by = time.monotonic() + seconds
        head = self._head[: self._in.take(self._head, by)]
        if len(head) % 8:
            raise BrokenSeal(f"{len(head)} bytes are no sizes")
        pieces: list[memoryview] = []
        for (size,) in struct.iter_unpack("<Q", head):
            if size > self._largest:
                raise BrokenSeal(f"a piece of {size} bytes; at most {self._largest} may come")
            given = place(pieces, size)
            parts = [np.empty(size, np.uint8).data] if given is None else given
            if sum(map(len, parts)) != size:
                raise BrokenSeal(f"a piece of {size} bytes; it does not fit where it belongs")
            for part in parts:
                done = 0
                while done < len(part):
                    done += self._in.take(part[done:], by)
            pieces.append(parts[0] if given is None else memoryview(b""))
        return pieces

    def wait(self, seconds: float = 0.0) -> bool:
        """Wait for the next message; False if there will be none. seconds: at most; 0 for no limit. TimeoutError: none
        has begun in time."""
        return self._in.wait(seconds)

    def end(self) -> None:
        """Wake who waits here, from another thread: nothing is sent or received any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _bytes_of(part: Any) -> Any:
    return part if callable(part) else np.frombuffer(part, np.uint8).data


@contextlib.contextmanager
def _limit(connection: socket.socket, which: int, seconds: float) -> Iterator[None]:
    """Limit each call that waits for the kernel meanwhile; 0 for no limit. TimeoutError: one has waited so long."""
    whole, rest = divmod(round(seconds * 1e6), 10**6)
    connection.setsockopt(socket.SOL_SOCKET, which, struct.pack("@ll", whole, rest))
    try:
        yield
    except BlockingIOError:
        raise TimeoutError(f"nothing has crossed for {seconds:g} s") from None


class _Sealing:
    """One direction of a connection. records: that have crossed."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._socket, self._cipher = connection, AESGCM(key)
        self._buffer = np.empty(_BUFFER, np.uint8).data  # what is never used of it takes no memory
        self.records = 0

    def _nonce(self) -> bytes:
        """Of the next record."""
        self.records += 1
        return self.records.to_bytes(12, "little")


class _Outgoing(_Sealing):
    _filled = 0

    def add(self, content: memoryview) -> None:
        """Seal a record, after what was sealed before was sent if both do not fit into the buffer."""
        if self._filled + _LENGTH + len(content) + _TAG > _BUFFER:
            self.flush()
        header, begin = len(content).to_bytes(_LENGTH, "little"), self._filled + _LENGTH
        self._buffer[self._filled : begin] = header
        self._filled = begin + len(content) + _TAG
        self._cipher.encrypt_into(self._nonce(), content, header, self._buffer[begin : self._filled])

    def flush(self) -> None:
        self._socket.sendall(self._buffer[: self._filled])
        self._filled = 0


class _Incoming(_Sealing):
    _begin, _end = 0, 0  # of what has come and was not taken yet

    @property
    def is_filled(self) -> bool:
        return self._end > self._begin

    def take(self, into: memoryview, by: float) -> int:
        """Open the next record into the beginning of this memory; its bytes."""
        from cryptography.exceptions import InvalidTag

        self._gather(_LENGTH, by)
        header = bytes(self._buffer[self._begin : self._begin + _LENGTH])
        length, most = int.from_bytes(header, "little"), min(RECORD, len(into))
        if not 0 < length <= most:
            raise BrokenSeal(f"a record of {length} bytes; at most {most} may come")
        self._gather(_LENGTH + length + _TAG, by)
        begin = self._begin + _LENGTH
        self._begin = begin + length + _TAG
        try:
            self._cipher.decrypt_into(self._nonce(), self._buffer[begin : self._begin], header, into[:length])
        except InvalidTag:
            raise BrokenSeal(f"a record of {length} bytes was not sealed as the next one") from None
        return length

    def wait(self, seconds: float) -> bool:
        """Wait until something comes; False if nothing will."""
        with _limit(self._socket, socket.SO_RCVTIMEO, seconds):
            return self.is_filled or self._receive(1)

    def _gather(self, count: int, by: float) -> None:
        while (missing := self._begin + count - self._end) > 0:
            if self._begin and self._begin + count > _BUFFER:
                have = self._end - self._begin
                self._buffer[:have] = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, have
            left = by - time.monotonic()
            if left <= 0:
                raise TimeoutError("a message has not come in time")
            with _limit(self._socket, socket.SO_RCVTIMEO, max(left, 1e-6)):
                if not self._receive(missing):
                    raise ConnectionResetError("the other end has closed the connection")

    def _receive(self, missing: int) -> bool:
        """Take from the kernel what is missing and, if that is little, what lies behind it; False if nothing will come.
        Much is waited for in one call: each costs as much as to open some 20 kB."""
        if not self.is_filled:
            self._begin = self._end = 0
        room = self._buffer[self._end : self._end + max(missing, _BEYOND)]
        count = self._socket.recv_into(room, 0, socket.MSG_WAITALL if missing > _BEYOND else 0)
        self._end += count
        return count > 0
