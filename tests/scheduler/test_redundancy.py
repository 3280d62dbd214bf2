"""More groups and members than are needed: who wins, who is cancelled, whose place is taken."""

from __future__ import annotations

import pytest
from tests.scheduler.test_conductor import Script

from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.settings import SchedulerSettings


def cancelled(script: Script) -> list[int]:
    return [command.ticket for command in script.of(r.CancelRow)]


def lent(script: Script) -> list[int]:
    return [ticket for command in script.of(r.StartUpdate) for ticket in command.tickets]


def groups(script: Script) -> dict[int, int]:
    """Ticket → group."""
    return {number: ticket.group for number, ticket in script.tickets.items()}


def test_by_default_no_ticket_is_redundant() -> None:
    script = Script(slots=5, max_lag=0, batch_size=2)
    assert sorted(script.tickets) == [0, 1]


def test_a_spare_group_has_the_rows_that_nobody_needs() -> None:
    script = Script(slots=5, max_lag=0, batch_size=2, extra_groups=2)
    assert groups(script) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert script.conductor.rollout.admission.outstanding == {0: 2}, "admission knows only the two that it needs"
    scarce = Script(slots=2, max_lag=0, batch_size=2, extra_groups=2)
    assert groups(scarce) == {0: 0, 1: 1}


def test_the_first_complete_groups_win_and_the_rest_is_cancelled() -> None:
    script = Script(slots=4, max_lag=0, batch_size=2, extra_groups=2)
    script.finish(3)  # a spare one: it takes the place of group 0
    assert script.said == []
    script.finish(1)
    assert lent(script) == [3, 1]
    assert sorted(cancelled(script)) == [0, 2]
    assert script.conductor.ledger.dropped == {"surplus": 2}
    assert script.conductor.ledger.running == 0


def test_a_finished_member_of_a_surplus_group_is_released() -> None:
    script = Script(slots=4, max_lag=0, batch_size=2, group_size=2, extra_groups=1)
    script.finish(2)
    script.finish(0)
    script.finish(1)
    assert lent(script) == [0, 1]
    assert script.of(r.ReleasePayloads) == [r.ReleasePayloads(("p2",))]
    assert cancelled(script) == [3]


def test_what_was_cancelled_but_ended_before_it_heard_is_released() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, extra_groups=1)
    script.finish(0)
    script.finish(1)
    assert cancelled(script) == [2]
    assert script.finish(2) == [r.ReleasePayloads(("p2",))]


def test_the_first_finished_members_of_a_group_win() -> None:
    script = Script(slots=5, max_lag=0, batch_size=2, group_size=2, extra_members=2)
    assert groups(script) == {0: 0, 1: 0, 2: 0, 3: 0}
    script.finish(3)
    script.finish(1)
    assert lent(script) == [1, 3]
    assert cancelled(script) == [0, 2]
    assert script.conductor.ledger.dropped == {"surplus": 2}


def test_extra_members_wait_until_every_group_has_what_it_needs() -> None:
    script = Script(slots=5, max_lag=0, batch_size=4, group_size=2, extra_members=1)
    assert groups(script) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 0}


def test_a_group_with_members_to_spare_outlives_one_that_fails_for_good() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, group_size=2, extra_members=1, max_attempts=1)
    script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert script.conductor.ledger.dropped == {"environment raised": 1}
    assert script.of(r.CancelRow) == []
    script.say(r.SampleFailed("sim", 0, 1, 1, r.DropReason.ENVIRONMENT_RAISED))  # now there are too few
    assert script.conductor.ledger.dropped == {"environment raised": 3}
    assert cancelled(script) == [2]


def test_a_spare_group_takes_the_place_of_one_that_failed() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, extra_groups=1, max_attempts=1)
    script.say(r.SampleFailed("sim", 0, 0, 1, r.DropReason.ENVIRONMENT_RAISED))
    assert groups(script)[3] == 3, "the next spare one begins"
    assert script.conductor.rollout.admission.spare == [3]
    script.finish(1)
    script.finish(2)
    assert sorted(lent(script)) == [1, 2]
    assert cancelled(script) == [3]


def test_a_place_goes_to_a_younger_version_and_the_old_straggler_is_cancelled() -> None:
    script = Script(slots=3, max_lag=1, batch_size=1, extra_groups=1, max_attempts=1)
    script.finish(1)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    script.say(
        r.SampleFailed("sim", 0, 2, 1, r.DropReason.ENVIRONMENT_RAISED)
        # the spare one of version 0; the next is of version 1
    )
    assert [script.tickets[number].version for number in range(5)] == [0, 0, 0, 1, 1]
    assert script.conductor.rollout.admission.outstanding == {0: 1, 1: 1}
    script.finish(4)
    assert lent(script) == [4]
    assert cancelled(script) == [0], "only tickets of version 1 are missing, and it may not take their places"
    assert script.conductor.rollout.admission.outstanding == {1: 1}


def test_surplus_is_no_fault() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, extra_groups=1, max_dropped=0)
    script.finish(0)
    script.finish(1)
    assert script.conductor.ledger.dropped == {"surplus": 1}
    assert script.of(r.Halt) == []


def test_a_drain_does_not_wait_for_what_is_cancelled() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, on_update="drain", extra_groups=1)
    script.finish(0)
    script.finish(1)
    script.say(r.UpdateDone("trainer", 0, 0))
    assert script.say(r.Published("trainer", 0, 1)) == [r.ApplyWeights("g0", 1)]


def test_the_selection_compares_what_is_known() -> None:
    script = Script(slots=4, max_lag=0, batch_size=2, group_size=2, extra_groups=1)
    script.now = 3.0
    script.finish(2)
    script.now = 5.0
    script.finish(0)
    script.finish(1)
    script.say(r.UpdateDone("trainer", 0, 0))
    assert script.conductor.rollout.selection.as_dict() == {
        "trained": {"samples": 2, "chunk_steps": 1.0, "env_steps": 1.0, "seconds": 5.0},
        "released": {"samples": 1, "chunk_steps": 1.0, "env_steps": 1.0, "seconds": 3.0},
        "cancelled": {"samples": 1, "seconds": 5.0},
        "waiting": {"samples": 0},
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_groups": -1}, "extra_groups is -1; it must be at least 0"),
        ({"extra_members": -1}, "extra_members is -1; it must be at least 0"),
        ({"extra_groups": 1, "order": "ticket"}, "make order arrival, or extra_groups 0"),
        ({"extra_members": 1, "segments": True}, "make segment_steps or extra_members 0"),
        ({"min_return": 1.0, "max_return": 0.0}, r"min_return is 1.0; it must be at most 0.0 \(max_return\)"),
        ({"min_return": 1.0, "segments": True}, "set segment_steps to 0, or take the bounds away"),
        ({"max_filtered": 0}, "max_filtered is 0; it must be at least 1"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SchedulerSettings(batch_size=2, **settings)  # type: ignore[arg-type]
