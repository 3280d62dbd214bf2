"""Parcels: values of any size on their way from one process of a run to another.

Each is a frame (`runtime.transport.frames`) that its sender keeps and its receiver takes, once. On one host it is a
file in shared memory that the receiver maps and unlinks, so nothing is copied again and the memory goes with the
receiver's arrays. From another host it is fetched over tcp. In one process it is a buffer that changes hands.

Invariant: a parcel is in one place, and whoever takes it is the only one who can write to what he gets.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from polyrhythm.errors import StartError
from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.transport.frames import Piece

PARCELS = "parcels"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class Parcels(Protocol):
    """Where this process keeps parcels for others, and takes theirs. host: the name of this process's host."""

    @property
    def host(self) -> str: ...

    def keep(self, parts: Sequence[Piece], copies: int = 1) -> list[str]:
        """Keep these bytes for `copies` receivers; the name for each. StartError: there is too little memory."""
        ...

    def take(self, host: str, name: str, nbytes: int) -> memoryview:
        """The bytes of a parcel that a process of this host keeps, to read and to write. LookupError: it is gone."""
        ...

    def drop(self, name: str) -> None:
        """Nobody will take this parcel of this process."""
        ...


class KeptParcels:
    """Parcels of one process."""

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

    def __len__(self) -> int:
        return len(self._kept)


class Asking(Protocol):
    """A connection to another host's server (`runtime.hosts.client.DataClient`)."""

    def ask(self, question: q.Question) -> list[memoryview]: ...


class SharedParcels:
    """Parcels in the run's folder in shared memory. owner: of this process, for names; clients: of the servers of the
    run's other hosts."""

    def __init__(self, folder: Path, owner: str, host: str = "", clients: Mapping[str, Asking] | None = None) -> None:
        self.host, self._folder, self._owner = host, folder / PARCELS, owner
        self._clients = clients or {}
        self._numbers = itertools.count()

    def keep(self, parts: Sequence[Piece], copies: int = 1) -> list[str]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        name = f"{self._owner}-{next(self._numbers)}"
        first = self._folder / name
        try:
            with first.open("xb", buffering=0) as file:
                for part in parts:
                    _write(file.fileno(), part)
        except OSError as error:
            first.unlink(missing_ok=True)
            if error.errno != errno.ENOSPC:
                raise
            wanted, free = sum(map(len, parts)) / 1e6, shutil.disk_usage(self._folder).free / 1e6
            raise StartError(
                f"shared memory: {wanted:,.1f} MB wanted for one item, {free:,.1f} MB free in {self._folder.parent}; "
                "lower the capacity of channels, send smaller items, or enlarge it (docker: --shm-size)"
            ) from error
        others = [f"{name}.{number}" for number in range(1, copies)]
        for other in others:
            (self._folder / other).hardlink_to(first)
        return [name, *others]

    def take(self, host: str, name: str, nbytes: int) -> memoryview:
        if not _NAME.fullmatch(name):
            raise LookupError(f"{name!r} names no parcel")
        if host != self.host:
            return self._fetch(host, name, nbytes)
        try:
            with (self._folder / name).open("rb") as file:
                found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, ValueError) as error:
            raise LookupError(f"parcel {name!r} is gone") from error
        (self._folder / name).unlink(missing_ok=True)
        return memoryview(found)

    def _fetch(self, host: str, name: str, nbytes: int) -> memoryview:
        """Bring a parcel from another host, in pieces."""
        if host not in self._clients:
            raise LookupError(f"parcel {name!r} lies on host {host!r}, which this process cannot read")
        found = memoryview(bytearray(nbytes))
        for begin in range(0, nbytes, q.PART_BYTES):
            stop = min(nbytes, begin + q.PART_BYTES)
            (piece,) = self._clients[host].ask(q.Parcel(name, begin, stop - begin, stop == nbytes))
            found[begin:stop] = piece
        return found

    def drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


def read_part(folder: Path, question: q.Parcel) -> bytes:
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


def _write(file: int, part: Piece) -> None:
    view = memoryview(part)
    while view:
        view = view[os.write(file, view) :]
