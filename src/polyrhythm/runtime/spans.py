"""Spans of time that stations measure for a timeline: which lane did what, from when to when.

A unit of work lasts from `begin` to `end`, which the launcher also counts as `busy_s`; after it the station names the
lanes that it was for. So the spans of a thread's units add up to its busy time exactly. Times are `time.monotonic`
seconds, which the processes of one host share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

#: Kinds of a slot's spans: being stepped or reset; waiting for tickets, for its simulator's thread or for an answer;
#: IN_BATCH: in a forward pass.
STEPPING, RESETTING = "stepping", "resetting"
TICKETS, THREAD, GENERATOR, IN_BATCH = "tickets", "thread", "generator", "in_batch"
#: Kinds of a generator's and of a trainer's spans.
PASS, APPLY = "pass", "apply"
UPDATE, PUBLISH, SAVE = "update", "publish", "save"
#: A scorer's.
SCORE = "score"
#: Kinds of any station that leases its device: coming onto it, leaving it.
TAKE, YIELD = "take", "yield"

#: Spans that a log holds. They are taken twice a second, and a thread does fewer units of work in that time.
_MOST = 8192


class Span(NamedTuple):
    """Work or waiting of a lane (the name of a slot or station), from begin to end.

    number: the request's sequence for `generator` and `in_batch`, the requests of a `pass`, the device of `take` and
    `yield`, the ticket of a `score`, the version or the update of the others. slots: that share the unit of work, each
    of which has a span like this; so a lane's part of the thread's time is (end - begin) / slots.
    """

    lane: str
    kind: str
    begin: float
    end: float
    number: int = 0
    slots: int = 1


class SpanLog:
    """Spans of one part of a station. Its thread adds them, any other may take them. on: they are measured."""

    def __init__(self, most: int = _MOST) -> None:
        self.on = False
        self._spans: deque[Span] = deque()
        self._most, self._lost, self._reported = most, 0, 0

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans; those for which there is no room are counted as lost."""
        for span in spans:
            if len(self._spans) < self._most:
                self._spans.append(span)
            else:
                self._lost += 1

    def take(self) -> tuple[list[Span], int]:
        """The spans since the last call, oldest first, and how many were lost meanwhile."""
        taken = [self._spans.popleft() for _ in range(len(self._spans))]
        lost, self._reported = self._lost - self._reported, self._lost
        return taken, lost
