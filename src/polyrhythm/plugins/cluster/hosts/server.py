"""Serves what a host holds to the processes of the run's other hosts: requests, finished samples, published weights.

It only reads, but a parcel is given once. Who has proven the run's keys gets a ticket for a sealed connection
(`plugins.cluster.sealed_port`) and asks there; a question that cannot be decoded or answered gets the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from polyrhythm.plugins.cluster.hosts import questions as q
from polyrhythm.plugins.cluster.hosts.pieces import pieces_of_request, pieces_of_sample
from polyrhythm.plugins.cluster.hosts.relay import Relay
from polyrhythm.plugins.cluster.parcels import read_part
from polyrhythm.plugins.cluster.sealed import MOST_PIECES, BrokenSeal, SealedConnection
from polyrhythm.plugins.cluster.sealed_port import SealedPort
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.process_memory import RANKS
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.shared_folder import shared_root
from polyrhythm.runtime.transport.drops import DropCounter, DropKind
from polyrhythm.runtime.transport.sockets import Sockets

#: Characters of a reason that who asks is told.
_REASON_CHARS = 500
#: Seconds within which the rest of a question has to come, and that who asks may take nothing of an answer.
_PATIENCE_S = 60.0


class DataServer:
    """What is answered; threads may ask at the same time. weights: what is published on this host; None if nothing is.
    folder: of the run on this host, with parcels; None if there are none. drops: counts what has no answer. relay: what
    other hosts publish; None if nobody here reads it."""

    def __init__(
        self,
        arena: Arena,
        weights: PublishedMemory | None,
        folder: Path | None = None,
        drops: DropCounter | None = None,
        relay: Relay | None = None,
    ) -> None:
        self._arena, self._weights, self._folder, self._relay = arena, weights, folder, relay
        self._drops = drops or DropCounter("the host's server")

    def answer(self, content: bytes | memoryview) -> list[Any]:
        """b"" or the reason why there is no answer, then its pieces."""
        try:
            pieces = [b"", *self._pieces(q.decode(content))]
            if len(pieces) > MOST_PIECES:
                raise LookupError(f"an answer of {len(pieces)} pieces; at most {MOST_PIECES} can be sent")
        except (LookupError, ValueError, RecursionError) as error:
            kind: DropKind = "impossible" if isinstance(error, LookupError) else "undecodable"
            self._drops.drop(kind, f"a question of {len(content)} bytes has no answer: {error}")
            return [str(error)[:_REASON_CHARS].encode(errors="replace") or b"no answer"]
        return pieces

    def _pieces(self, question: q.Question) -> Iterator[Any]:
        layout = self._arena.layout
        match question:
            case q.Posted(slots):
                yield from self._requests(slots)
            case q.SampleEntries(block, begin, count, obs):
                if not 0 <= block < layout.blocks:
                    raise LookupError(f"there is no block {block}")
                yield from pieces_of_sample(self._arena, block, begin, count, obs=obs)
            case q.ParcelPart() | q.RunFile() if self._folder is not None:
                yield from _read_file(self._folder, question)
            case q.ReadClocks():
                yield q.encode((time.monotonic_ns(), time.time_ns()))
            case q.Sees(known):
                if (shared := q.find_shared(known, shared_root())) is not None:
                    yield from (shared[0].host.encode(), str(shared[1]).encode())
            case _:
                yield from self._pieces_of_weights(question)

    def _pieces_of_weights(self, question: q.Question) -> Iterator[Any]:
        if isinstance(question, q.Part | q.RelayedPart) and (
            question.begin < 0 or not 0 < question.length <= q.PART_BYTES
        ):
            raise LookupError(f"there are no bytes {question.begin} to {question.begin + question.length} of a version")
        match question:
            case q.Held():
                yield q.encode(self._weights.held() if self._weights is not None else {})
            case q.Part() if self._weights is not None:
                yield from _bytes_of(self._weights, question)
            case q.Bring() if self._relay is not None:
                yield self._relay.bring(question)
            case q.RelayedPart() if self._relay is not None:
                yield from self._relay.part(question)
            case _:
                raise LookupError(f"{type(question).__name__} is not answered here")

    def _requests(self, slots: Iterable[tuple[str, int]]) -> Iterator[Any]:
        for slot, rows in slots:
            if not 0 < rows <= self._arena.layout.slots.get(slot, 0):
                raise LookupError(f"slot {slot} has no request of {rows} rows")
            yield from pieces_of_request(self._arena, slot, rows)


def _bytes_of(weights: PublishedMemory, asked: q.Part) -> Iterator[Any]:
    """The bytes where they lie, so that they are read once, and b"1" if the publication was there until then."""
    version, number, begin, length = msgspec.structs.astuple(asked)
    part = weights.find_part(version, number, slice(begin, begin + length))
    if part is not None:
        yield part
        yield lambda: b"1" if weights.has(version, number) else b"0"


def _read_file(folder: Path, asked: q.ParcelPart | q.RunFile) -> Iterator[Any]:
    if isinstance(asked, q.ParcelPart):
        yield read_part(folder, asked)
        return
    if asked.name != q.PAIR_FILE and ("/" in asked.name or not asked.name.endswith(RANKS)):
        raise LookupError(f"{asked.name!r} is not where ranks meet")
    with suppress(FileNotFoundError):
        yield (folder / asked.name).read_bytes()


def _one_piece(before: Sequence[memoryview], size: int) -> None:  # noqa: ARG001
    """A question in memory of its own. BrokenSeal: another piece follows it."""
    if before:
        raise BrokenSeal("a question of several pieces")


class Answers(Protocol):
    def answer(self, content: bytes | memoryview) -> list[Any]: ...


class HostServer:
    """Who may ask is asked for at `endpoint`, which is authenticated; each connection is answered in a thread of its
    own. first_s: seconds within which it has to bring its first question. StartError: there is no address. OSError:
    there is no port."""

    def __init__(self, sockets: Sockets, server: Answers, drops: DropCounter, first_s: float = 10.0) -> None:
        self._server, self._first_s = server, first_s
        self._port = SealedPort(sockets.address, self._converse, q.LARGEST_QUESTION, drops)
        try:
            self._end = sockets.answering(q.TICKET_BYTES)
        except BaseException:
            self._port.close()
            raise
        self.endpoint = self._end.endpoint

    def serve(self, seconds: float) -> None:
        """Give one ticket, if somebody asks for one in time. RuntimeError: tickets are of no use any more."""
        self._port.check()
        received = self._end.receive(seconds)
        if received is None:
            return
        who, _ = received
        try:
            self._end.answer(who, [b"", q.encode(self._port.admit())])
        except LookupError as error:
            self._end.answer(who, [str(error).encode()])

    def _converse(self, connection: SealedConnection) -> None:
        first = self._first_s  # who has a ticket but not its keys may have nothing to say
        while connection.wait(first):
            (question,) = connection.receive(first or _PATIENCE_S, _one_piece)
            connection.send(self._server.answer(question), _PATIENCE_S)
            first = 0.0

    def close(self) -> None:
        self._end.close()
        self._port.close()
