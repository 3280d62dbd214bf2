"""The queue of samples without a score: who gets which, what comes again first, who is alone."""

from __future__ import annotations

import pytest

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.scoring.queue import ScorerState, ScoringQueue
from polyrhythm.scheduler.records import ReleasePayloads, ScorerJoined, SimulatorJoined, StationLost
from polyrhythm.scheduler.settings import SchedulerSettings, ScoringRules


def queue(*places: int, tickets: int = 0) -> ScoringQueue:
    found = ScoringQueue(scorers={f"c{index}": ScorerState(count) for index, count in enumerate(places)})
    for ticket in range(tickets):
        found.add(ticket)
    return found


def started(found: ScoringQueue) -> list[tuple[str, int]]:
    return [(scorer, begun.ticket) for scorer, begun in found.begin()]


def test_samples_go_in_their_order_to_the_scorer_with_the_fewest() -> None:
    found = queue(2, 1, tickets=5)
    assert started(found) == [("c0", 0), ("c1", 1), ("c0", 2)]
    assert [waiting.ticket for waiting in found.waiting] == [3, 4]
    found.end("c1", 1)
    assert started(found) == [("c1", 3)]


def test_a_sample_that_failed_goes_first_and_counts_its_tries() -> None:
    found = queue(1, tickets=3)
    ((_, begun),) = found.begin()
    found.retry(found.end("c0", begun.number))
    assert found.waiting[0].failed == 1
    assert started(found) == [("c0", 0)]
    found.retry(found.end("c0", 1), blame=False)
    assert found.waiting[0].failed == 1


def test_a_sample_whose_scorer_was_lost_is_alone() -> None:
    found = queue(3, tickets=4)
    first = found.begin()
    assert len(first) == 3
    found.retry(found.end("c0", 0), alone=True)
    assert started(found) == [], "it waits until the scorer has nothing else, and nobody passes it"
    found.end("c0", 1)
    found.end("c0", 2)
    assert started(found) == [("c0", 0)], "and nobody joins it"
    found.end("c0", 3)
    assert started(found) == [("c0", 3)]


@pytest.mark.parametrize("blame", [True, False])
def test_what_was_given_up_is_released_when_its_scorer_is_gone(blame: bool) -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=1, scoring=ScoringRules()))
    conductor.handle(ScorerJoined("c0", 0, 2), 0.0)
    scoring = conductor.rollout.scoring
    scoring.add(5)
    scoring.begin()
    assert not scoring.give_up(5, "block")
    commands = conductor.handle(StationLost("c0", 0, "died", blame), 1.0)
    assert commands == [ReleasePayloads(("block",))]
    assert not scoring.waiting


def test_a_station_that_is_no_scorer_is_lost_as_before() -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=1, scoring=ScoringRules()))
    conductor.handle(SimulatorJoined("s", 0, ()), 0.0)
    conductor.handle(ScorerJoined("c0", 0), 0.0)
    conductor.handle(StationLost("s", 0, "died"), 1.0)
    assert list(conductor.rollout.scoring.scorers) == ["c0"]


@pytest.mark.parametrize("name", ["max_attempts", "max_evaluations"])
def test_rules_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; it must be at least 1"):
        ScoringRules(**{name: 0})


def test_segments_have_no_score() -> None:
    with pytest.raises(ValueError, match="segments, which have no score; set segment_steps to 0"):
        SchedulerSettings(batch_size=1, segments=True, scoring=ScoringRules())


def test_a_run_saved_when_the_queue_was_a_part_of_the_rollout_is_restored() -> None:
    conductor = build_conductor(SchedulerSettings(batch_size=1, scoring=ScoringRules()))
    conductor.rollout.scoring.add(5)
    saved = conductor.save()
    saved["rollout"]["scoring"] = saved.pop("scoring")
    assert restore_conductor(conductor.settings, saved).rollout.scoring == conductor.rollout.scoring
    plain = build_conductor(SchedulerSettings(batch_size=1))
    assert "scoring" not in plain.save()
    restored = restore_conductor(plain.settings, {**plain.save(), "rollout": saved["rollout"]})
    assert restored.rollout.scoring == plain.rollout.scoring
