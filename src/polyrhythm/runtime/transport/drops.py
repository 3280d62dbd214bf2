"""Counts dropped messages by kind; the first of each kind is logged, and each new reason for which a simulator may not
join."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Literal

log = logging.getLogger(__name__)

#: stranger: a connection without the run's keys. too_large, undecodable: not a message of this protocol. misdirected:
#: the receiver is not its addressee. unknown_station, earlier_incarnation: its sender is not a present station.
#: impossible: its content contradicts what was sent and announced before. refused: a simulator that may not join.
DropKind = Literal[
    "stranger",
    "too_large",
    "undecodable",
    "misdirected",
    "unknown_station",
    "earlier_incarnation",
    "impossible",
    "refused",
]
#: Prefix of the kinds in a station's counters.
DROPPED = "dropped/"
#: Characters of a reason that are logged, so that garbage cannot fill the log.
_REASON_CHARS = 300
#: Reasons of refusals that are logged.
_REASONS = 20


class UnfitMessage(ValueError):
    """A message cannot be accepted. Raised before anything has changed."""

    def __init__(self, kind: DropKind, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class DropCounter:
    """Counts the dropped messages of one process; any thread may use it. owner: name of the process in the log."""

    def __init__(self, owner: str) -> None:
        self._owner, self._turn = owner, threading.Lock()
        self._counts: Counter[str] = Counter()
        self._reasons: set[str] = set()

    def drop(self, kind: DropKind, why: str) -> None:
        """Count a dropped message, and log a warning if it is the first of its kind, or a refusal for a new reason."""
        reason = why if len(why) <= _REASON_CHARS else f"{why[:_REASON_CHARS]} …"
        with self._turn:
            self._counts[kind] += 1
            first = self._counts[kind] == 1
            if kind == "refused" and len(self._reasons) < _REASONS:
                first = reason not in self._reasons
                self._reasons.add(reason)
        if first:
            log.warning("%s dropped a message (%s): %s; more like it are only counted", self._owner, kind, reason)

    def stranger(self) -> None:
        """Count a connection that was refused because it lacks the keys of this run."""
        self.drop("stranger", "a connection did not have the keys of this run")

    def counts(self) -> dict[str, int]:
        """Dropped messages so far, by kind."""
        with self._turn:
            return dict(self._counts)

    def statistics(self) -> dict[str, float]:
        """`counts` in the form of a station's counters."""
        return {DROPPED + kind: float(count) for kind, count in self.counts().items()} if self._counts else {}
