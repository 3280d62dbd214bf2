"""Brings published versions into a host's mirror, and passes them on to other hosts meanwhile: the agent's part.

Hosts that do not publish are the nodes of a tree below the host that does: by their sorted names, each has at most
`FANOUT` children (`route`). A host copies a publication from its parent, which begins to copy it when it is first asked
and answers with the parts that it has; so the publisher's host sends it `FANOUT` times at most, however many hosts
there are. Whoever asks names the hosts above it. One that is silent, has no part within `q.RELAY_S` or is rid of the
publication is passed over, for the others above it in order and the publisher last; the copy goes on where it stands.

    queued     another copy is under way
    filling    its first `filled` bytes are there, and those are served
    whole      processes of this host read it by its number in the mirror
    over       it was overwritten by another, or failed

Invariant: a publication is named by the host, version and number under which it was published, and bytes count as there
once the host that sent them has said, after it had sent them, that it still had that publication. Whatever overwrites
a buffer ends the copy in it first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.specs.weights import WeightsLayout

log = logging.getLogger(__name__)

#: Hosts that copy a version from one host, as long as none is lost.
FANOUT = 2
#: The mirror's segment in the run's folder, and the folder of its locks.
MIRROR, _LOCKS = "mirror", "mirror.locks"
#: Bytes of the largest piece that a relay receives.
LARGEST_PART = q.PART_BYTES + q.HEAD_BYTES
#: Seconds for which a host is passed over that was silent or slow.
_AVOID_S = 60.0


def route(own: str, hosts: Sequence[str]) -> list[str]:
    """The hosts from which `own` copies, its parent first and the publisher last. hosts: of the tree, the publisher
    first, then the others in an order that is the same on each host; an unknown host is a child of the publisher."""
    place, found = hosts.index(own) if own in hosts else 1, list[str]()
    while place > 0:
        place = (place - 1) // FANOUT
        found.append(hosts[place])
    return found


class CopyProgress(NamedTuple):
    """Of a copy. received: bytes of all copies that have come to this host; number: in the mirror, 0 until it is whole;
    first: this is the first process of the host that asks for it; sources: its bytes by the host that sent them; gone:
    the publisher has it no more, or it was overwritten here."""

    received: int
    number: int
    first: bool
    sources: dict[str, int]
    gone: bool = False


decode_progress = msgspec.msgpack.Decoder(CopyProgress).decode


def mirror_locks(folder: Path) -> Path:
    """The folder of the mirror's locks; made if it is not there."""
    locks = folder / _LOCKS
    locks.mkdir(exist_ok=True)
    return locks


class _Copy:
    """A publication in the mirror, or on its way there. origin: publisher, version and number."""

    def __init__(self, origin: tuple[str, int, int]) -> None:
        self.origin = origin
        self.memory = memoryview(b"")
        self.filled = self.number = 0
        self.over, self.gone = "", False  # why it is no longer there; whether the publication is
        self.claimed = False
        self.sources = Counter[str]()

    @property
    def ended(self) -> bool:
        return bool(self.number or self.over)


class _Gone(LookupError):
    """The host that was asked has not got this publication."""


class Relay:
    """folder: of the run on this host; connect: makes a client of another host's server, by its name and endpoint."""

    def __init__(self, layout: WeightsLayout, folder: Path, connect: Callable[[str, str], DataClient]) -> None:
        self._layout, self._folder, self._connect = layout, folder, connect
        self._memory: PublishedMemory | None = None
        self._changed = threading.Condition()
        self._one = threading.Lock()  # held by the copy under way
        self._copies: list[_Copy] = []
        self._received = 0
        self._clients: dict[tuple[str, str], DataClient] = {}
        self._avoided: dict[str, float] = {}  # until when

    # ------------------------------------------------------------ what is asked

    def bring(self, asked: q.Bring) -> bytes:
        """For a process of this host: its `CopyProgress` once it is whole, or after `q.PROGRESS_S`. LookupError: it
        cannot be had, though it is not gone."""
        copy = self._copy_of(asked.source)
        with self._changed:
            first, copy.claimed = not copy.claimed, True
            self._changed.wait_for(lambda: copy.ended, q.PROGRESS_S)
            if copy.over and not copy.gone:
                raise LookupError(copy.over)
            return q.encode(CopyProgress(self._received, copy.number, first, dict(copy.sources), copy.gone))

    def part(self, asked: q.RelayedPart) -> Iterator[Any]:
        """For another host: as for `q.Part`. LookupError: it is not here within `q.RELAY_S`."""
        copy = self._copy_of(asked.source, other=True)
        if copy is None:
            return
        stop = asked.begin + asked.length
        with self._changed:
            self._changed.wait_for(lambda: copy.filled >= stop or copy.over, q.RELAY_S)
            if copy.filled < stop and not copy.over:
                raise LookupError(f"bytes {asked.begin} to {stop} have not come here within {q.RELAY_S:g} s")
        if not copy.over:
            yield copy.memory[asked.begin : stop]
            yield lambda: b"0" if copy.over else b"1"

    def _copy_of(self, source: q.Relayed, *, other: bool = False) -> Any:
        """The copy of this publication, which begins if there is none. other: for another host, so None if a newer
        publication of its publisher is here."""
        if not source.route:
            raise LookupError("a publication without a host that has it")
        origin = (source.route[-1][0], source.version, source.number)
        with self._changed:
            newest = 0
            for copy in self._copies:
                if copy.origin == origin:
                    return copy
                newest = max(newest, copy.origin[2] if copy.origin[0] == origin[0] else 0)
            if other and newest > source.number:
                return None
            copy = _Copy(origin)
            self._copies.append(copy)
        threading.Thread(target=self._fill, args=(copy, source), name="relay", daemon=True).start()
        return copy

    # ------------------------------------------------------------ the copying thread

    def _fill(self, copy: _Copy, source: q.Relayed) -> None:
        """Consumes: parts of one publication. Waits for: the copy before it, a reader that is in the middle of the
        buffer, each part. Unblocked by: these, or the limit of an answer. Produces: the publication in the mirror."""
        try:
            with self._one:
                memory = self._open()
                with memory.writing(source.version) as index:
                    self._overwrite(copy, memory.buffers[index])
                    self._fetch(copy, source)
                    number = int(memory.numbers[index])
            with self._changed:
                copy.number = number
                self._changed.notify_all()
        except Exception as error:
            if not isinstance(error, LookupError):
                log.exception("version %d could not be copied", source.version)
            with self._changed:
                self._end(copy, str(error) or type(error).__name__, gone=isinstance(error, _Gone))

    def _open(self) -> PublishedMemory:
        if self._memory is None:
            try:
                segment = memoryview(open_segment(self._folder, MIRROR))
            except FileNotFoundError as error:
                raise LookupError("this host has no memory for what others publish") from error
            self._memory = PublishedMemory(self._layout, segment, mirror_locks(self._folder))
        return self._memory

    def _overwrite(self, copy: _Copy, memory: memoryview) -> None:
        """From now on the memory is this copy's."""
        with self._changed:
            for older in [other for other in self._copies if other.memory is memory]:
                self._end(older, f"version {older.origin[1]} was overwritten", gone=True)
            copy.memory = memory

    def _end(self, copy: _Copy, why: str, *, gone: bool) -> None:
        copy.over, copy.gone, copy.number = why, gone, 0
        if copy in self._copies:
            self._copies.remove(copy)
        self._changed.notify_all()

    def _fetch(self, copy: _Copy, source: q.Relayed) -> None:
        """Receive all parts, from the first host of the route that has them. LookupError: none has."""
        for position, (host, endpoint) in enumerate(source.route):
            above = source.route[position + 1 :]
            if above and self._avoided.get(host, 0.0) > time.monotonic():
                continue
            try:
                self._fetch_from(host, endpoint, copy, q.Relayed(source.version, source.number, above))
                return
            except LookupError as error:
                if not above:
                    raise
                if not isinstance(error, _Gone):
                    self._avoided[host] = time.monotonic() + _AVOID_S
                    words = "version %d comes past host %s for %.0f s: %s"
                    log.warning(words, source.version, host, _AVOID_S, error)

    def _fetch_from(self, host: str, endpoint: str, copy: _Copy, asked: q.Relayed) -> None:
        if (host, endpoint) not in self._clients:
            self._clients[host, endpoint] = self._connect(host, endpoint)
        memory = copy.memory
        parts = [memory[begin : begin + q.PART_BYTES] for begin in range(copy.filled, len(memory), q.PART_BYTES)]
        coming, begin = iter(parts), copy.filled

        def questions() -> Iterator[q.Question]:
            for index, part in enumerate(parts):
                where = begin + index * q.PART_BYTES
                if asked.route:
                    yield q.RelayedPart(asked, where, len(part))
                else:
                    yield q.Part(asked.version, asked.number, where, len(part))

        def place(before: Sequence[memoryview], size: int) -> Sequence[memoryview] | None:  # noqa: ARG001
            return None if before else [next(coming)]

        answers = self._clients[host, endpoint].ask_all(questions(), q.AHEAD, place)
        for part, answer in zip(parts, answers, strict=True):
            if not answer or bytes(answer[-1]) != b"1":
                raise _Gone(f"version {asked.version} is gone from host {host}")
            with self._changed:
                self._received += len(part)
                copy.filled += len(part)
                copy.sources[host] += len(part)
                self._changed.notify_all()

    def close(self) -> None:
        for client in list(self._clients.values()):
            client.close()
