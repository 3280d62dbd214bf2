"""Which stations are present, by incarnation: events of an earlier incarnation are refused.

Invariant: a station has at most one present incarnation, and only events of that one are accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import (
    BatchDone,
    Checkpointed,
    DeviceTaken,
    DeviceYielded,
    Event,
    GeneratorJoined,
    Published,
    RequestArrived,
    SampleFailed,
    SampleFinished,
    SampleScored,
    ScorerJoined,
    ScoringFailed,
    SimulatorJoined,
    StationLost,
    StreamDone,
    TrainerJoined,
    UpdateDone,
    WeightsApplied,
)

#: Field that names the sending station, for events that an earlier incarnation may still send.
_SENDER: dict[type, str] = {
    **dict.fromkeys((StationLost, DeviceTaken, DeviceYielded), "station"),
    **dict.fromkeys((RequestArrived, SampleFinished, SampleFailed), "simulator"),
    **dict.fromkeys((BatchDone, StreamDone, WeightsApplied), "generator"),
    **dict.fromkeys((SampleScored, ScoringFailed), "scorer"),
    **dict.fromkeys((UpdateDone, Published, Checkpointed), "trainer"),
}
#: The same for joining, which only a later incarnation outdates.
_NEWCOMER: dict[type, str] = {
    SimulatorJoined: "simulator",
    GeneratorJoined: "generator",
    TrainerJoined: "trainer",
    ScorerJoined: "scorer",
}


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
        elif (newcomer := _NEWCOMER.get(kind)) is not None:
            present = self.incarnations.get(getattr(event, newcomer), event.incarnation)  # type: ignore[union-attr]
            outdated = event.incarnation < present  # type: ignore[union-attr]
        else:
            return False
        self.refused += outdated
        return outdated
