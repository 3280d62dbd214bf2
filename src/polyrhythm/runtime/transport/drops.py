"""Messages that were dropped: counted by kind, and said once for each kind."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Literal

log = logging.getLogger(__name__)

#: stranger: a connection without the run's keys; too_large, undecodable: no message of ours; misdirected: not for whom
#: it reached; unknown_station, earlier_incarnation: signed by nobody who is present; impossible: its content is.
DropKind = Literal[
    "stranger", "too_large", "undecodable", "misdirected", "unknown_station", "earlier_incarnation", "impossible"
]
#: How a station's counters call them, before the kind.
DROPPED = "dropped/"
#: Characters of a reason that are logged: who sends rubbish does not fill the log.
_SAID = 300


class UnfitMessage(ValueError):
    """A message that is not obeyed: found before anything has changed."""

    def __init__(self, kind: DropKind, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class DropCounter:
    """Counts for one process, from any of its threads. owner: in the log."""

    def __init__(self, owner: str) -> None:
        self._owner, self._turn = owner, threading.Lock()
        self._counts: Counter[str] = Counter()

    def drop(self, kind: DropKind, why: str) -> None:
        """A message was dropped: count it, and warn if it is the first of its kind."""
        with self._turn:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
        if first:
            said = why if len(why) <= _SAID else f"{why[:_SAID]} …"
            log.warning("%s dropped a message (%s): %s; more of this kind are only counted", self._owner, kind, said)

    def stranger(self) -> None:
        """Someone without the keys of this run was refused."""
        self.drop("stranger", "whoever connected has not the keys of this run")

    def counts(self) -> dict[str, int]:
        """How many so far, by kind."""
        with self._turn:
            return dict(self._counts)

    def statistics(self) -> dict[str, float]:
        """The same as a station's counters."""
        return {DROPPED + kind: float(count) for kind, count in self.counts().items()} if self._counts else {}
