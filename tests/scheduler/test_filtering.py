"""Groups whose mean return says nothing are dropped and replaced; a bound ends that."""

from __future__ import annotations

import pytest
from tests.scheduler.test_conductor import Script

from polyrhythm.scheduler import records as r


def ends(script: Script, number: int, episode_return: float) -> list[r.Command]:
    ticket = script.tickets[number]
    return script.say(
        r.SampleFinished(
            *("sim", 0, number, ticket.attempt, f"p{number}", r.SampleEnd.TERMINATED),
            *(1, 1, ticket.version, ticket.version, episode_return > 0, episode_return),
        )
    )


def test_by_default_every_group_counts() -> None:
    script = Script(slots=2, max_lag=0, batch_size=2, group_size=2)
    ends(script, 0, float("nan"))
    ends(script, 1, -1e9)
    assert script.conductor.ledger.lent == 2


@pytest.mark.parametrize(
    ("returns", "kept"), [((0.0, 0.0), False), ((1.0, 0.0), True), ((1.0, 1.0), False), ((0.4, 0.6), True)]
)
def test_a_group_is_kept_if_its_mean_return_lies_within_the_bounds(returns: tuple[float, float], kept: bool) -> None:
    script = Script(slots=2, max_lag=0, batch_size=2, group_size=2, min_return=0.5, max_return=0.9)
    ends(script, 0, returns[0])
    ends(script, 1, returns[1])
    assert script.conductor.ledger.lent == (2 if kept else 0)
    assert script.conductor.ledger.dropped == ({} if kept else {"filtered": 2})


def test_a_filtered_groups_samples_are_released_and_a_new_group_begins() -> None:
    script = Script(slots=2, max_lag=0, batch_size=2, group_size=2, min_return=0.5)
    ends(script, 0, 0.0)
    ends(script, 1, 0.0)
    assert script.of(r.ReleasePayloads) == [r.ReleasePayloads(("p0",)), r.ReleasePayloads(("p1",))]
    assert [grant.ticket.group for start in script.of(r.StartRows) for grant in start.grants] == [1, 1]
    assert script.tickets[2].seed != script.tickets[0].seed


def test_the_new_group_has_the_version_that_is_applied_by_then() -> None:
    script = Script(slots=3, max_lag=1, batch_size=1, min_return=0.5, on_update="continue")
    ends(script, 0, 1.0)
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    ends(script, 1, 0.0)
    assert script.tickets[max(script.tickets)].version == 1


def test_after_max_filtered_groups_the_update_takes_what_comes_and_says_so_once() -> None:
    script = Script(slots=1, max_lag=0, batch_size=2, min_return=0.5, max_filtered=2)
    assert r.FilterExhausted(2) not in ends(script, 0, 0.0) + ends(script, 1, 0.0)
    assert r.FilterExhausted(2) in ends(script, 2, 0.0)
    said = ends(script, 3, 0.0)
    assert not any(isinstance(command, r.FilterExhausted) for command in said)
    (lend,) = script.of(r.StartUpdate)
    assert lend.tickets == (2, 3)
    assert script.conductor.rollout.filter.accepted == 2
    script.say(r.UpdateDone("trainer", 0, 0))
    script.say(r.Published("trainer", 0, 1))
    script.applied(1)
    ends(script, 4, 0.0)
    assert script.conductor.ledger.dropped == {"filtered": 3}, "the next update counts anew"


def test_or_the_run_stops() -> None:
    script = Script(slots=1, max_lag=0, batch_size=2, min_return=0.5, max_filtered=1, on_max_filtered="stop")
    assert not any(isinstance(command, r.Halt) for command in ends(script, 0, 0.0))
    ends(script, 1, 0.0)
    (halt,) = script.of(r.Halt)
    assert halt.reason == (
        "more than max_filtered 1 groups of one update had a mean return outside [0.5, inf]; "
        "widen the bounds, raise max_filtered, or make on_max_filtered accept"
    )


def test_filtered_samples_are_no_faults() -> None:
    script = Script(slots=1, max_lag=0, batch_size=2, min_return=0.5, max_dropped=0)
    ends(script, 0, 0.0)
    assert script.conductor.ledger.dropped == {"filtered": 1}
    assert script.of(r.Halt) == []


def test_a_spare_group_takes_the_place_of_a_filtered_one() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, min_return=0.5, extra_groups=1)
    ends(script, 0, 0.0)
    assert script.conductor.rollout.admission.spare == [3], "group 2 has a place now, and the next spare one begins"
    ends(script, 1, 1.0)
    ends(script, 2, 1.0)
    (lend,) = script.of(r.StartUpdate)
    assert lend.tickets == (1, 2)
    assert [command.ticket for command in script.of(r.CancelRow)] == [3]


def test_a_spare_group_that_is_filtered_leaves_the_others_their_places() -> None:
    script = Script(slots=3, max_lag=0, batch_size=2, min_return=0.5, extra_groups=1)
    ends(script, 2, 0.0)
    assert script.conductor.rollout.admission.outstanding == {0: 2}
    assert script.conductor.rollout.admission.spare == [3]
