"""The sample ledger: counts of training samples by state, so that none is trained twice or lost.

Invariant, at every event: started = trained + lent + buffered + scoring + running + reissuing + dropped + rolled_back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from polyrhythm.scheduler.records import NO_FAULTS, DropReason


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
    running: int = 0
    reissuing: int = 0
    scoring: int = 0
    buffered: int = 0
    lent: int = 0
    trained: int = 0
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
        return {
            "started": self.started,
            "trained": self.trained,
            "lent": self.lent,
            "buffered": self.buffered,
            "scoring": self.scoring,
            "running": self.running,
            "reissuing": self.reissuing,
            "rolled_back": self.rolled_back,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
        }
