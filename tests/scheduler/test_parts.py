"""An update that begins with the groups that may be lent, and gets the others as they may be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.scheduler.test_conductor import Script

from polyrhythm.conductors import restore_conductor
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.settings import LeaseSettings, SchedulerSettings


def parts_of(script: Script) -> list[tuple[int, tuple[int, ...], bool]]:
    return [(command.update, command.tickets, command.more) for command in script.of(r.StartUpdate)]


def test_each_group_is_lent_when_it_is_complete_and_all_are_released_together() -> None:
    script = Script(slots=6, batch_size=6, group_size=2, max_lag=0, parts=True)
    said = []
    for number in (1, 5, 4, 0, 2, 3):
        script.finish(number)
        said.append(parts_of(script))
    assert said == [[], [], [(0, (4, 5), True)], [(0, (0, 1), True)], [], [(0, (2, 3), False)]]
    assert script.conductor.ledger.lent == 6
    released, published = script.say(r.UpdateDone("trainer", 0, 0))
    assert published == r.PublishWeights("trainer", 1)
    assert isinstance(released, r.ReleasePayloads)
    assert sorted(released.payload_ids) == [f"p{number}" for number in range(6)]


def test_an_update_that_lacks_samples_cannot_be_done() -> None:
    script = Script(max_lag=0, parts=True)
    script.finish(0)
    with pytest.raises(AssertionError, match="not all of its samples were lent"):
        script.say(r.UpdateDone("trainer", 0, 0))


def test_a_young_group_does_not_take_the_place_that_an_old_one_needs() -> None:
    """Two samples of version 0 must be among the first four; all that is left of those is theirs."""
    script = Script(slots=4, max_lag=1, parts=True)
    script.finish(0)
    script.finish(1)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    assert script.tickets[4].version == 1
    script.finish(4)
    assert parts_of(script) == []
    script.finish(3)
    assert parts_of(script) == [(1, (3,), True)]
    script.finish(2)
    assert parts_of(script) == [(1, (2,), False)]


def test_a_lost_trainer_gives_all_parts_back() -> None:
    script = Script(slots=4, batch_size=4, max_lag=0, parts=True)
    for number in (2, 0, 3):
        script.finish(number)
    assert script.conductor.ledger.lent == 3
    script.say(r.StationLost("trainer", 0, "killed"))
    assert (script.conductor.ledger.lent, script.conductor.ledger.buffered) == (0, 3)
    script.say(r.TrainerJoined("trainer", 1, 0))
    assert parts_of(script) == [(0, (2, 0, 3), True)]
    script.finish(1)
    assert parts_of(script) == [(0, (1,), False)]


def test_a_halted_run_begins_no_update_but_lends_the_rest_of_one() -> None:
    script = Script(max_lag=1, slots=4, parts=True)
    script.finish(0)
    script.conductor.halted = True
    script.finish(1)
    assert parts_of(script) == [(0, (1,), False)]
    script.finish(2)
    script.say(r.UpdateDone("trainer", 0, 0))
    assert parts_of(script) == []


def test_a_run_that_is_resumed_in_the_middle_of_an_update_begins_it_anew() -> None:
    script = Script(slots=3, batch_size=3, max_lag=0, parts=True)
    script.finish(1)
    script.finish(0)
    saved = json.loads(json.dumps(script.conductor.save()))
    script.conductor = restore_conductor(script.conductor.settings, saved)
    script.conductor.detach()
    assert (script.conductor.ledger.lent, script.conductor.ledger.buffered) == (0, 2)
    script.say(r.TrainerJoined("trainer", 1, 0))
    assert parts_of(script) == [(0, (1, 0), True)]


@pytest.mark.parametrize(
    "changes",
    [
        {"order": "ticket"},
        {"batching": "lockstep"},
        {"streaming": False},
        {"lease": LeaseSettings({"trainer": (0,), "g0": (0,)})},
    ],
)
def test_where_a_trainer_may_not_wait_for_samples_updates_are_whole(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="parts is true but updates are lent whole"):
        SchedulerSettings(batch_size=2, parts=True, **changes)
