"""Serves what a host holds to the processes of the run's other hosts: requests, finished samples, published weights.

It only reads. Whoever asks has proven the run's keys; a question that cannot be decoded or answered gets the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import zmq

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.pieces import pieces_of_request, pieces_of_sample
from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.memory.published import PublishedMemory

log = logging.getLogger(__name__)


class DataServer:
    """Answers over `socket`, which is bound. weights: what is published on this host; None if nothing is."""

    def __init__(self, socket: zmq.Socket[bytes], arena: Arena, weights: PublishedMemory | None) -> None:
        self._socket, self._arena, self._weights = socket, arena, weights

    def serve(self, seconds: float) -> None:
        """Answer one question, if one comes in time."""
        if not self._socket.poll(round(seconds * 1000)):
            return
        who, *question = self._socket.recv_multipart()
        number, answer = question[0] if question else b"", [b"a question has two parts"]
        if len(question) == 2:
            answer = self._answer(question[1])
        self._socket.send_multipart([who, number, *answer], copy=False)

    def _answer(self, content: bytes) -> list[Any]:
        try:
            return [b"", *self._pieces(q.decode(content))]
        except (LookupError, ValueError, RecursionError) as error:
            log.warning("a question of %d bytes has no answer: %s", len(content), error)
            return [str(error).encode() or b"no answer"]

    def _pieces(self, question: q.Question) -> Iterator[Any]:
        layout = self._arena.layout
        match question:
            case q.Posted(slots):
                for slot, rows in slots:
                    if not 0 < rows <= layout.slots.get(slot, 0):
                        raise LookupError(f"slot {slot} has no request of {rows} rows")
                    yield from pieces_of_request(self._arena, slot, rows)
            case q.Sample(block):
                if not 0 <= block < layout.blocks:
                    raise LookupError(f"there is no block {block}")
                yield from pieces_of_sample(self._arena, block)
            case q.Held():
                yield q.encode(self._weights.held() if self._weights is not None else {})
            case q.Part(version, number, begin, length):
                if self._weights is None or not (begin >= 0 and 0 < length <= q.PART_BYTES):
                    raise LookupError(f"there are no bytes {begin} to {begin + length} of a version here")
                part = self._weights.read_part(version, number, slice(begin, begin + length))
                if part is not None:
                    yield part
