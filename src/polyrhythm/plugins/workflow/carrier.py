"""Transfers nested values between the processes of a workflow.

The way depends on the size and the two ends only:

    message   at most 32 KiB: inside the message itself
    kept      in one process: the buffer is handed over
    host      on one host: a file in shared memory, which the receiver maps; the sender makes one copy
    tcp       from another host: pieces of 4 MiB, authenticated and encrypted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from polyrhythm.plugins.cluster.parcels import KeptParcels, Parcels
from polyrhythm.plugins.workflow import values
from polyrhythm.runtime.transport import frames

#: Bytes of the largest value that goes within its message.
SMALL = 32 * 2**10
_DECODER = msgspec.msgpack.Decoder(tuple[bytes, tuple[int, ...]])


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """A value in transit: its bytes, or the host and the name under which they are kept."""

    nbytes: int
    content: bytes = b""
    host: str = ""
    name: str = ""


def pack_whole(value: Any, what: str) -> Parcel:
    """A parcel that contains its bytes, whatever their size. TypeError: the value cannot be sent."""
    content = frames.pack(*values.encode(value, what))
    return Parcel(len(content), content)


class Carrier:
    """One process's end. channel: makes a channel of this process by name; device: where received tensors go. ways:
    number of parcels received, by way."""

    def __init__(self, parcels: Parcels, channel: Callable[[str], Any], device: str = "cpu") -> None:
        self.ways: Counter[str] = Counter()
        self._parcels, self._channel, self._device = parcels, channel, device

    def pack(self, value: Any, what: str, copies: int = 1) -> list[Parcel]:
        """One parcel of the value for each of `copies` receivers. what: names the value in errors. TypeError: it cannot
        be sent. StartError: it does not fit into shared memory."""
        parts = frames.parts_of(*values.encode(value, what))
        nbytes = sum(map(len, parts))
        if nbytes <= SMALL:
            return [Parcel(nbytes, b"".join(parts))] * copies
        return [Parcel(nbytes, host=self._parcels.host, name=name) for name in self._parcels.keep(parts, copies)]

    def unpack(self, parcel: Parcel) -> Any:
        """The value of a parcel; a parcel can be unpacked once. LookupError: it is gone.
        UnfitMessage: it is damaged."""
        memory = memoryview(bytearray(parcel.content)) if parcel.content else self._take(parcel)
        if parcel.content:
            self.ways["message"] += 1
        content, pieces = frames.unpack(memory, _DECODER)
        return values.decode(content, pieces, self._channel, self._device)

    def _take(self, parcel: Parcel) -> memoryview:
        memory = self._parcels.take(parcel.host, parcel.name, parcel.nbytes)
        apart = "host" if parcel.host == self._parcels.host else "tcp"
        self.ways["kept" if isinstance(self._parcels, KeptParcels) else apart] += 1
        return memory

    def drop(self, parcel: Parcel) -> None:
        """Free a parcel of this process that nobody will receive."""
        if not parcel.content:
            self._parcels.drop(parcel.name)
