"""The ledger's reasons are a fixed set: no text of an exception becomes a key of it."""

from __future__ import annotations

import pytest

from polyrhythm.conductors import build_conductor
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.samples.groups import SampleLedger, SampleState
from polyrhythm.scheduler.settings import SchedulerSettings


def test_a_sample_is_dropped_for_a_known_reason_only() -> None:
    ledger = SampleLedger()
    ledger.start()
    with pytest.raises(AssertionError, match="not for a DropReason"):
        ledger.move(SampleState.RUNNING, SampleState.DROPPED, reason="step: ValueError: 17")  # type: ignore[arg-type]
    ledger.move(SampleState.RUNNING, SampleState.DROPPED, reason=r.DropReason.DEADLINE)
    assert ledger.as_dict()["dropped"] == {"deadline": 1}


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (r.DropReason.ENVIRONMENT_RAISED, "step: ValueError: x is 17"),
        (r.DropReason.POLICY_NOT_FINITE, "policy: logprob is not finite"),
        (r.DropReason.REFUSED, "its rows were cancelled"),
    ],
)
def test_the_ledgers_key_is_the_reason_and_never_the_error(reason: r.DropReason, error: str) -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=1, max_attempts=1))
    conductor.handle(r.GeneratorJoined("g", 0, 0), 0.0)
    conductor.handle(r.WeightsOffered(0), 0.0)
    conductor.handle(r.TrainUntil(1), 0.0)
    slots = (r.SlotInfo("s", 0, 1),)
    (start,) = conductor.handle(r.SimulatorJoined("sim", 0, (r.EnvBatchInfo("e", slots),)), 0.0)
    assert isinstance(start, r.StartRows)
    conductor.handle(r.SampleFailed("sim", 0, start.grants[0].ticket.number, 1, reason, error), 0.0)
    assert conductor.ledger.dropped == {reason: 1}
    assert all(isinstance(key, r.DropReason) for key in conductor.ledger.dropped)
