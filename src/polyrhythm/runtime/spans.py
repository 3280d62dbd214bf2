"""What stations did, measured where they did it: spans of time, while somebody wants them for a timeline.

A unit of work lasts from `begin` to `end`, as the launcher measures it for `busy_s`; the station says afterwards which
lanes it was for. So nothing is estimated, and the spans of a thread's units add up to its busy time exactly.
Times are `time.monotonic` seconds, which the processes of one host share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

#: What is done to a slot, and what it waits for: a ticket, its simulator's thread, an answer; IN_BATCH: being served.
STEPPING, RESETTING = "stepping", "resetting"
TICKETS, THREAD, GENERATOR, IN_BATCH = "tickets", "thread", "generator", "in_batch"
#: What a generator and a trainer do.
PASS, APPLY = "pass", "apply"
UPDATE, PUBLISH, SAVE = "update", "publish", "save"

#: Spans that are kept until they are taken, twice a second: more than a thread does in that time.
_MOST = 8192


class Span(NamedTuple):
    """What the lane (a slot's or a station's name) was at, from begin to end.

    number: the request's sequence for `generator` and `in_batch`, the requests of a `pass`, the version or the update
    of the others. slots: that share the unit of work, each of which has a span like this; so a lane's part of the
    thread's time is (end - begin) / slots.
    """

    lane: str
    kind: str
    begin: float
    end: float
    number: int = 0
    slots: int = 1


class SpanLog:
    """The latest spans of one part of a station. Its thread adds, any other may take. on: somebody wants them."""

    def __init__(self, most: int = _MOST) -> None:
        self.on = False
        self._spans: deque[Span] = deque()
        self._most, self._lost, self._told = most, 0, 0

    def add(self, spans: Iterable[Span]) -> None:
        """Keep them; what there is no room for is counted."""
        for span in spans:
            if len(self._spans) < self._most:
                self._spans.append(span)
            else:
                self._lost += 1

    def take(self) -> tuple[list[Span], int]:
        """The spans since the last call, oldest first, and how many were lost meanwhile."""
        taken = [self._spans.popleft() for _ in range(len(self._spans))]
        lost, self._told = self._lost - self._told, self._lost
        return taken, lost
