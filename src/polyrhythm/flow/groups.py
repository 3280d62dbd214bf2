"""Groups: the samples that share task and initial state, granted, lent and dropped together.

Without grouping every sample is a group of one, so there is a single path. A group is as old as its oldest
member: the version of its first ticket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.flow.ledger import State
from polyrhythm.flow.records import Ticket


@dataclass(slots=True)
class Sample:
    """A training or evaluation ticket that is not finally settled, and where it is.

    slot, row: present place while running; handle, oldest (behaviour version): set when it finished.
    """

    ticket: Ticket
    state: State = State.RUNNING
    slot: str = ""
    row: int = -1
    handle: str = ""
    oldest: int = -1


@dataclass(slots=True)
class Group:
    """members: ticket numbers granted so far; finished: how many of them are complete."""

    number: int
    version: int
    size: int
    members: list[int] = field(default_factory=list)
    finished: int = 0
    completed_order: int = -1

    @property
    def complete(self) -> bool:
        return self.finished == self.size
