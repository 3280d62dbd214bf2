"""Samples with their states, the groups that they form, and the ledger that counts them by state.

A group's samples share task and initial state, and are granted, trained and dropped together. Without grouping every
sample is a group of one, so there is a single path. The version of a group is that of its first ticket.

Invariants: all members of a group enter training together. At every event: started = trained + lent + buffered +
scoring + running + reissuing + dropped + rolled_back, so that no training sample is trained twice or lost.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum

from polyrhythm.scheduler.records import NO_FAULTS, DropReason, Ticket


class SampleState(StrEnum):
    """State of a sample, named by its key in `ledger.json`. The last three are final."""

    RUNNING = "running"
    REISSUING = "reissuing"
    SCORING = "scoring"
    BUFFERED = "buffered"
    IN_TRAINING = "lent"
    TRAINED = "trained"
    ROLLED_BACK = "rolled_back"
    DROPPED = "dropped"


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


#: What may follow what; anything else is a bug of ours.
_FOLLOWS: dict[SampleState, frozenset[SampleState]] = {
    SampleState.RUNNING: frozenset(
        {SampleState.BUFFERED, SampleState.SCORING, SampleState.REISSUING, SampleState.DROPPED}
    ),
    SampleState.REISSUING: frozenset({SampleState.RUNNING, SampleState.DROPPED}),
    SampleState.SCORING: frozenset({SampleState.BUFFERED, SampleState.REISSUING, SampleState.DROPPED}),
    SampleState.BUFFERED: frozenset({SampleState.IN_TRAINING, SampleState.REISSUING, SampleState.DROPPED}),
    SampleState.IN_TRAINING: frozenset({SampleState.TRAINED, SampleState.BUFFERED}),
    SampleState.TRAINED: frozenset({SampleState.ROLLED_BACK}),
}


@dataclass(slots=True)
class SampleLedger:
    """Counts of samples by state; `dropped` is by `DropReason`."""

    started: int = 0
    trained: int = 0
    lent: int = 0
    buffered: int = 0
    scoring: int = 0
    running: int = 0
    reissuing: int = 0
    rolled_back: int = 0
    dropped: dict[DropReason, int] = field(default_factory=dict)

    def start(self) -> None:
        self.started += 1
        self.running += 1

    def move(self, source: SampleState, target: SampleState, count: int = 1, reason: DropReason | None = None) -> None:
        assert target in _FOLLOWS[source], f"a sample cannot go from {source} to {target}"
        if target is SampleState.DROPPED:
            assert isinstance(reason, DropReason), f"a sample is dropped for {reason!r}, not for a DropReason"
        setattr(self, source, getattr(self, source) - count)
        if target is SampleState.DROPPED:
            assert reason is not None
            self.dropped[reason] = self.dropped.get(reason, 0) + count
        else:
            setattr(self, target, getattr(self, target) + count)
        assert getattr(self, source) >= 0, f"more samples left {source} than ever came"

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    def dropped_for_faults(self) -> dict[DropReason, int]:
        return {reason: count for reason, count in self.dropped.items() if reason not in NO_FAULTS}

    @property
    def dropped_by_faults(self) -> int:
        return sum(self.dropped_for_faults().values())

    @property
    def imbalance(self) -> int:
        """started minus the sum of all states; nonzero is a bug."""
        waiting = self.reissuing + self.scoring + self.buffered
        return self.started - self.trained - self.lent - waiting - self.running - self.rolled_back - self.dropped_total

    def as_dict(self) -> dict[str, int | dict[str, int]]:
        return {**asdict(self), "dropped": {reason.value: count for reason, count in self.dropped.items()}}
