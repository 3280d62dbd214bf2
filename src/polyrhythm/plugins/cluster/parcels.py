"""Parcels: values of any size on their way from one process of a run to another.

Each is a frame that its sender keeps and its receiver takes, once:

    length of the head (4 bytes), head, padding, piece, padding, piece, padding, ...

The head is MessagePack of (content, bytes of each piece). Reading one executes nothing and allocates nothing by what it
claims: the pieces lie in the frame itself. On one host a parcel is a file in shared memory that the receiver maps and
unlinks, so nothing is copied again and the memory goes with the receiver's arrays. From another host it is fetched over
tcp; a parcel for several receivers is fetched once for each host and kept there for the others, until the next one of
that sender comes. In one process it is a buffer that changes hands.

    <folder>/parcels/OWNER-NUMBER       for one receiver
    <folder>/parcels/OWNER-NUMBER@COPY  for each of several: links to one file
    <folder>/parcels/HOST~OWNER~NUMBER  fetched from there, for the receivers of this host

Invariant: a parcel is taken once, and its taker alone can write to the memory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polyrhythm.errors import StartError
from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.runtime.transport.drops import UnfitMessage

Piece = bytes | memoryview
Content = TypeVar("Content")
#: Bytes of the head's length; alignment of head and pieces.
_LENGTH, _ALIGNMENT = 4, 64
_encode = msgspec.msgpack.Encoder().encode


def parts_of(content: Any, pieces: Sequence[Piece] = ()) -> list[Piece]:
    """The parts of a frame, in order, to be written one after another."""
    head = _encode((content, [len(piece) for piece in pieces]))
    parts: list[Piece] = [len(head).to_bytes(_LENGTH, "little"), head, bytes(-(_LENGTH + len(head)) % _ALIGNMENT)]
    for piece in pieces:
        parts += (piece, bytes(-len(piece) % _ALIGNMENT))
    return parts


def pack(content: Any, pieces: Sequence[Piece] = ()) -> bytes:
    """The frame of what MessagePack can encode, and pieces of bytes."""
    return b"".join(parts_of(content, pieces))


def unpack(
    frame: bytes | memoryview, decoder: msgspec.msgpack.Decoder[tuple[Content, tuple[int, ...]]]
) -> tuple[Content, list[memoryview]]:
    """The content and its pieces, in place. UnfitMessage: this is no frame of such content."""
    view = memoryview(frame)
    begin = _LENGTH + int.from_bytes(view[:_LENGTH], "little")
    try:
        content, lengths = decoder.decode(view[_LENGTH:begin])
    except (ValueError, RecursionError) as error:
        raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes has no head ({error})") from error
    pieces = []
    for length in lengths:
        begin += -begin % _ALIGNMENT
        if length < 0 or begin + length > len(view):
            raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes cannot hold a piece of {length}")
        pieces.append(view[begin : begin + length])
        begin += length
    if begin + -begin % _ALIGNMENT != len(view):
        raise UnfitMessage("undecodable", f"a frame of {len(view)} bytes; its pieces end at {begin}")
    return content, pieces


PARCELS = "parcels"
_NAME = re.compile(r"(?P<owner>[A-Za-z0-9_.-]{1,150})-(?P<number>[0-9]{1,20})(?P<copy>@[0-9]{1,9})?")


class KeptParcels:
    """Parcels of one process; methods as in `SharedParcels`."""

    host = ""

    def __init__(self) -> None:
        self._kept: dict[str, bytearray] = {}
        self._numbers = itertools.count()

    def keep(self, parts: Sequence[Piece], copies: int = 1) -> list[str]:
        names = [str(next(self._numbers)) for _ in range(copies)]
        self._kept |= {name: bytearray().join(parts) for name in names}
        return names

    def take(self, host: str, name: str, nbytes: int) -> memoryview:  # noqa: ARG002
        try:
            return memoryview(self._kept.pop(name))
        except KeyError:
            raise LookupError(f"parcel {name!r} is gone") from None

    def drop(self, name: str) -> None:
        self._kept.pop(name, None)


class SharedParcels:
    """Where this process keeps parcels for others and takes theirs: the run's folder in shared memory. owner: of this
    process, for names; host: the name of this process's host; clients: of the servers of the run's other hosts."""

    def __init__(
        self, folder: Path, owner: str, host: str = "", clients: Mapping[str, DataClient] | None = None
    ) -> None:
        self.host, self._folder, self._owner = host, folder / PARCELS, owner
        self._clients = clients or {}
        self._numbers = itertools.count()

    def keep(self, parts: Sequence[Piece], copies: int = 1) -> list[str]:
        """Keep these bytes for `copies` receivers; the name for each. StartError: there is too little memory."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{self._owner}-{next(self._numbers)}"
        names = [name] if copies == 1 else [f"{name}@{copy}" for copy in range(copies)]
        first = self._folder / names[0]
        self._write(first, parts, sum(map(len, parts)))
        for other in names[1:]:
            (self._folder / other).hardlink_to(first)
        return names

    def _write(self, path: Path, parts: Iterable[Piece], nbytes: int) -> None:
        """Write a file whole, or leave none. StartError: there is too little memory."""
        try:
            with path.open("wb", buffering=0) as file:
                for part in parts:
                    left = memoryview(part)
                    while left:
                        left = left[os.write(file.fileno(), left) :]
        except BaseException as error:
            path.unlink(missing_ok=True)
            if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
                raise
            free = shutil.disk_usage(self._folder).free / 1e6
            raise StartError(
                f"shared memory: {nbytes / 1e6:,.1f} MB wanted for one item, {free:,.1f} MB free in "
                f"{self._folder.parent}; lower the capacity of channels, send smaller items, or enlarge it (docker: "
                "--shm-size)"
            ) from error

    def take(self, host: str, name: str, nbytes: int) -> memoryview:
        """The bytes of a parcel that a process of this host keeps, to read and to write. LookupError: it is gone."""
        known = _NAME.fullmatch(name)
        if known is None:
            raise LookupError(f"{name!r} names no parcel")
        if host == self.host:
            try:
                found = _map(self._folder / name)
            except (FileNotFoundError, ValueError) as error:
                raise LookupError(f"parcel {name!r} is gone") from error
            (self._folder / name).unlink(missing_ok=True)
            return found
        if host not in self._clients:
            raise LookupError(f"parcel {name!r} lies on host {host!r}, which this process cannot read")
        if known["copy"]:
            return self._fetch_once(host, known, nbytes)
        found = memoryview(bytearray(nbytes))
        for begin, piece in self._pieces(host, name, nbytes):
            found[begin : begin + len(piece)] = piece
        self._release(host, name, nbytes)
        return found

    def _fetch_once(self, host: str, known: re.Match[str], nbytes: int) -> memoryview:
        """The parcel as another process of this host has fetched it, or fetch it for all of them."""
        name, owner, number = known[0], known["owner"], known["number"]
        self._folder.mkdir(mode=0o700, exist_ok=True)
        here = self._folder / f"{host}~{owner}~{number}"
        with (self._folder / f"{host}~{owner}.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not here.exists():
                for earlier in self._folder.glob(f"{host}~{owner}~*"):
                    earlier.unlink()
                coming = self._folder / f"{host}~{owner}.coming"
                self._write(coming, (piece for _, piece in self._pieces(host, name, nbytes)), nbytes)
                coming.rename(here)
            found = _map(here)
        self._release(host, name, nbytes)
        return found

    def _pieces(self, host: str, name: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        for begin in range(0, nbytes, q.PART_BYTES):
            (piece,) = self._clients[host].ask(q.ParcelPart(name, begin, min(q.PART_BYTES, nbytes - begin), False))
            yield begin, piece

    def _release(self, host: str, name: str, nbytes: int) -> None:
        """It is taken: its host may forget it."""
        self._clients[host].ask(q.ParcelPart(name, nbytes - 1, 1, True))

    def drop(self, name: str) -> None:
        """Nobody will take this parcel of this process."""
        (self._folder / name).unlink(missing_ok=True)


Parcels = KeptParcels | SharedParcels


def read_part(folder: Path, question: q.ParcelPart) -> bytes:
    """What another host asks for of a parcel in the run's folder of this one. LookupError: there is no such part."""
    file = folder / PARCELS / question.name
    if not _NAME.fullmatch(question.name) or not (question.begin >= 0 and 0 < question.length <= q.PART_BYTES):
        raise LookupError(f"there are no {question.length} bytes of a parcel {question.name!r} here")
    try:
        with file.open("rb") as opened:
            opened.seek(question.begin)
            part = opened.read(question.length)
    except FileNotFoundError as error:
        raise LookupError(f"parcel {question.name!r} is gone") from error
    if len(part) != question.length:
        raise LookupError(f"parcel {question.name!r} ends before byte {question.begin + question.length}")
    if question.last:
        file.unlink(missing_ok=True)
    return part


def _map(path: Path) -> memoryview:
    """The file's memory; what is written to it is this process's own."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
