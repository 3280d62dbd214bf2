"""Serves what a host holds to the processes of the run's other hosts: requests, finished samples, published weights.

It only reads, but a parcel is given once. Whoever asks has proven the run's keys; a question that cannot be decoded or
answered gets the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.identity import find_shared
from polyrhythm.runtime.hosts.pieces import pieces_of_request, pieces_of_sample
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.parcels import read_part
from polyrhythm.runtime.memory.published import PublishedMemory
from polyrhythm.runtime.memory.shared_folder import shared_root
from polyrhythm.runtime.transport.drops import DropCounter, DropKind
from polyrhythm.runtime.transport.exchange import AnsweringEnd

#: Characters of a reason that who asks is told.
_REASON_CHARS = 500


class DataServer:
    """Answers at `end`. weights: what is published on this host; None if nothing is. folder: of the run on this host,
    with parcels; None if there are none."""

    def __init__(
        self, end: AnsweringEnd, arena: Arena, weights: PublishedMemory | None, folder: Path | None = None
    ) -> None:
        self._end, self._arena, self._weights, self._folder = end, arena, weights, folder
        self._drops = DropCounter("the host's server")

    def serve(self, seconds: float) -> None:
        """Answer one question, if one comes in time."""
        received = self._end.receive(seconds)
        if received is None:
            return
        who, question = received
        number, answer = question[0] if question else b"", [b"a question has two parts"]
        if len(question) == 2:
            answer = self._answer(question[1])
        self._end.answer(who, [number, *answer])

    def _answer(self, content: bytes) -> list[Any]:
        try:
            return [b"", *self._pieces(q.decode(content))]
        except (LookupError, ValueError, RecursionError) as error:
            kind: DropKind = "impossible" if isinstance(error, LookupError) else "undecodable"
            self._drops.drop(kind, f"a question of {len(content)} bytes has no answer: {error}")
            return [str(error)[:_REASON_CHARS].encode() or b"no answer"]

    def _pieces(self, question: q.Question) -> Iterator[Any]:
        layout = self._arena.layout
        match question:
            case q.Posted(slots):
                yield from self._requests(slots)
            case q.Sample(block, begin, count):
                if not 0 <= block < layout.blocks:
                    raise LookupError(f"there is no block {block}")
                yield from pieces_of_sample(self._arena, block, begin, count)
            case q.Parcel() if self._folder is not None:
                yield read_part(self._folder, question)
            case q.Clock():
                yield q.encode((time.monotonic_ns(), time.time_ns()))
            case q.Sees(known):
                if (shared := find_shared(known, shared_root())) is not None:
                    yield from (shared[0].host.encode(), str(shared[1]).encode())
            case q.Held():
                yield q.encode(self._weights.held() if self._weights is not None else {})
            case q.Part():
                yield from self._bytes_of(question)
            case _:
                raise LookupError(f"{type(question).__name__} is not answered here")

    def _requests(self, slots: Iterable[tuple[str, int]]) -> Iterator[Any]:
        for slot, rows in slots:
            if not 0 < rows <= self._arena.layout.slots.get(slot, 0):
                raise LookupError(f"slot {slot} has no request of {rows} rows")
            yield from pieces_of_request(self._arena, slot, rows)

    def _bytes_of(self, asked: q.Part) -> Iterator[bytes]:
        version, number, begin, length = asked.version, asked.number, asked.begin, asked.length
        if self._weights is None or not (begin >= 0 and 0 < length <= q.PART_BYTES):
            raise LookupError(f"there are no bytes {begin} to {begin + length} of a version here")
        part = self._weights.read_part(version, number, slice(begin, begin + length))
        if part is not None:
            yield part
