"""Finished samples of a lost host run again under their numbers."""

from __future__ import annotations

from tests.scheduler.test_conductor import Script

from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.settings import ScoringRules


def finish(script: Script, number: int) -> None:
    places = ("sim", 0, number, 1, f"p{number}", r.SampleEnd.TERMINATED)
    script.say(r.SampleFinished(*places, 1, 1, 0, 0, True, 1.0))


def test_the_deadline_of_the_run_that_was_lost_does_not_end_the_one_that_replaces_it() -> None:
    script = Script(slots=2, max_lag=0, batch_size=2, episode_deadline_s=600.0)
    assert sorted(script.tickets) == [0, 1]
    script.now = 100.0
    finish(script, 1)
    script.now = 580.0
    said = script.say(r.PayloadsLost("far", ("p1",)))
    assert r.ReleasePayloads(("p1",)) in said
    assert [grant.ticket for command in script.of(r.StartRows) for grant in command.grants] == [script.tickets[1]]
    script.now = 601.0
    assert [command.ticket for command in script.say(r.Wake()) if isinstance(command, r.CancelRow)] == [0]
    script.now = 1181.0
    assert [command.ticket for command in script.say(r.Wake()) if isinstance(command, r.CancelRow)][-1] == 1


def test_a_block_that_a_scorer_reads_is_released_after_its_answer() -> None:
    """The scorer may still fetch it from the lost host: what comes is written to this block of the scorer's host."""
    script = Script(slots=2, max_lag=0, batch_size=2, scoring=ScoringRules())
    script.say(r.ScorerJoined("scorer", 0, 1))
    finish(script, 0)
    (begun,) = script.of(r.ScoreSample)
    assert begun.payload_id == "p0"
    said = script.say(r.PayloadsLost("far", ("p0",)))
    assert [grant.ticket.number for command in script.of(r.StartRows) for grant in command.grants] == [0]
    assert not [command for command in said if isinstance(command, r.ReleasePayloads)]
    said = script.say(r.ScoringFailed("scorer", 0, begun.number, 0, "gone", "the sample is not there any more"))
    assert said == [r.ReleasePayloads(("p0",))]
