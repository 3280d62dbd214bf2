"""Carries nested values between the processes of a workflow, in the way that their size and the two ends allow.

    message   at most 32 KiB: within the message that says of it
    kept      in one process: a buffer changes hands
    host      on one host: a file in shared memory, which the receiver maps; one copy, made by the sender
    tcp       from another host, in pieces of 4 MiB, authenticated and encrypted

Which of the last three it is depends on where the parcel lies and who takes it, nothing else.
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
    """A value on its way: its bytes, or the host and the name under which they are kept."""

    nbytes: int
    content: bytes = b""
    host: str = ""
    name: str = ""


def pack_whole(value: Any, what: str) -> Parcel:
    """A parcel that has its bytes with it, whatever they are. TypeError: it cannot be sent."""
    content = frames.pack(*values.encode(value, what))
    return Parcel(len(content), content)


class Carrier:
    """One process's end. channel: makes a channel of this process by name; device: of what this process receives.
    ways: parcels received so far, by way."""

    def __init__(self, parcels: Parcels, channel: Callable[[str], Any], device: str = "cpu") -> None:
        self.ways: Counter[str] = Counter()
        self._parcels, self._channel, self._device = parcels, channel, device

    def pack(self, value: Any, what: str, copies: int = 1) -> list[Parcel]:
        """Parcels of a value, one for each of `copies` receivers. what: it is, for errors. TypeError: it cannot be
        sent. StartError: it does not fit into shared memory."""
        parts = frames.parts_of(*values.encode(value, what))
        nbytes = sum(map(len, parts))
        if nbytes <= SMALL:
            return [Parcel(nbytes, b"".join(parts))] * copies
        return [Parcel(nbytes, host=self._parcels.host, name=name) for name in self._parcels.keep(parts, copies)]

    def unpack(self, parcel: Parcel) -> Any:
        """The value of a parcel, which is gone then. LookupError: it is gone already. UnfitMessage: it is damaged."""
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
        """Nobody will take this parcel, which this process packed."""
        if not parcel.content:
            self._parcels.drop(parcel.name)
