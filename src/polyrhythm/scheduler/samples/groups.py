"""Groups: samples that share task and initial state, and are granted, trained and dropped together.

Without grouping every sample is a group of one, so there is a single path. The version of a group is that of its first
ticket.

Invariant: all members of a group enter training together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import Ticket
from polyrhythm.scheduler.samples.ledger import SampleState


@dataclass(slots=True)
class Sample:
    """A ticket that is neither trained nor dropped, with its state.

    slot, row: where it runs; started: start time, in seconds. payload_id, oldest (behaviour version), episode_return,
    success, metrics, texts, chunk_steps, env_steps, and seconds in its row: set when it finished. score: by a scorer;
    from then on episode_return includes it.
    """

    ticket: Ticket
    state: SampleState = SampleState.RUNNING
    slot: str = ""
    row: int = -1
    payload_id: str = ""
    oldest: int = -1
    episode_return: float = 0.0
    started: float = 0.0
    chunk_steps: int = 0
    env_steps: int = 0
    seconds: float = 0.0
    success: bool | None = None
    metrics: tuple[tuple[str, float], ...] = ()
    texts: tuple[str, ...] = ()
    score: float = 0.0


@dataclass(slots=True)
class Group:
    """size: members that it needs. granted: tickets so far; members: numbers of those not dropped. finished: number of
    complete members; returns: the sum of their returns. spare: no quota is reserved for it (see `redundancy`)."""

    number: int
    version: int
    size: int
    spare: bool = False
    granted: int = 0
    members: list[int] = field(default_factory=list)
    finished: int = 0
    returns: float = 0.0
    completed_order: int = -1

    @property
    def complete(self) -> bool:
        return self.finished == self.size
