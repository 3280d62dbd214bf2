"""Which stations are present, by incarnation: events of an earlier incarnation are refused.

Invariant: a station has at most one present incarnation, and only events of that one are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import JOINED, SENDERS, Event

#: Events that an earlier incarnation may still send; joining is outdated only by a later incarnation.
_SENDER = {kind: name for kind, name in SENDERS.items() if kind not in JOINED}


@dataclass(slots=True)
class StationRegistry:
    """incarnations: present station → its incarnation; refused: events refused so far."""

    incarnations: dict[str, int] = field(default_factory=dict)
    refused: int = 0

    def is_outdated(self, event: Event) -> bool:
        """Whether the event comes from an incarnation that is not present (then it is counted as refused)."""
        kind = type(event)
        if (sender := _SENDER.get(kind)) is not None:
            outdated = self.incarnations.get(getattr(event, sender)) != event.incarnation  # type: ignore[union-attr]
        elif kind in JOINED:
            present = self.incarnations.get(getattr(event, SENDERS[kind]), event.incarnation)  # type: ignore[union-attr]
            outdated = event.incarnation < present  # type: ignore[union-attr]
        else:
            return False
        self.refused += outdated
        return outdated
