"""A task and seed whose episodes keep failing is set aside, with its whole group."""

from __future__ import annotations

import json

import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings
from tests.scheduler.test_conductor import Script

from polyrhythm.conductors import restore_conductor
from polyrhythm.scheduler import records as r
from polyrhythm.scheduler.records import DropReason
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm.scheduler.samples.limits import FaultLimit
from polyrhythm.scheduler.settings import SchedulerSettings


def fails(
    script: Script, number: int, attempt: int = 1, reason: DropReason = DropReason.ENVIRONMENT_RAISED
) -> list[r.Command]:
    return script.say(r.SampleFailed("sim", 0, number, attempt, reason, "env: raised"))


def finishes(script: Script, number: int, attempt: int = 1) -> list[r.Command]:
    version = script.tickets[number].version
    return script.say(
        r.SampleFinished(
            *("sim", 0, number, attempt, f"p{number}", r.SampleEnd.TERMINATED), *(1, 1, version, version, True, 1.0)
        )
    )


def notices(commands: list[r.Command]) -> list[r.EpisodeSetAside]:
    return [command for command in commands if isinstance(command, r.EpisodeSetAside)]


def group_of_three(**settings: object) -> Script:
    return Script(slots=3, max_lag=0, batch_size=3, group_size=3, max_attempts=9, **settings)


def test_failures_of_all_members_count_together_and_the_group_goes_whole() -> None:
    script = group_of_three(quarantine_after=3)
    start = script.tickets[0].start
    finishes(script, 0)
    assert not notices(fails(script, 1) + fails(script, 2))
    said = fails(script, 1, attempt=2)
    assert notices(said) == [r.EpisodeSetAside(*start, 3, DropReason.ENVIRONMENT_RAISED)]
    assert script.conductor.ledger.dropped == {"environment raised": 3}, "the finished one and the running one too"
    assert r.ReleasePayloads(("p0",)) in said
    assert [command.ticket for command in said if isinstance(command, r.CancelRow)] == [2]
    assert script.conductor.summary()["set_aside"] == [
        {"task": start[0], "seed": start[1], "reason": "environment raised"}
    ]
    assert {script.tickets[number].group for number in script.tickets if number > 2} == {1}, "another group replaces it"


def test_an_episode_that_finishes_clears_the_count() -> None:
    script = group_of_three(quarantine_after=3)
    fails(script, 0)
    fails(script, 1)
    finishes(script, 2)
    assert not notices(fails(script, 0, attempt=2) + fails(script, 1, attempt=2))
    assert notices(fails(script, 0, attempt=3))


@pytest.mark.parametrize("reason", [DropReason.POLICY_NOT_FINITE, DropReason.REFUSED])
def test_failures_that_are_not_the_environments_do_not_count(reason: DropReason) -> None:
    script = group_of_three(quarantine_after=1)
    assert not notices(fails(script, 0, reason=reason))
    assert script.conductor.ledger.dropped == {}


@pytest.mark.parametrize("quarantine_after", [0, 3])
def test_a_refused_episode_is_set_aside_at_once_and_no_fault(quarantine_after: int) -> None:
    script = group_of_three(quarantine_after=quarantine_after, max_dropped=0)
    start = script.tickets[0].start
    assert notices(fails(script, 1, reason=DropReason.EPISODE_REFUSED)) == [
        r.EpisodeSetAside(*start, 1, DropReason.EPISODE_REFUSED)
    ]
    assert script.conductor.ledger.dropped == {"episode refused": 3}
    assert script.conductor.ledger.dropped_by_faults == 0
    assert {script.tickets[number].group for number in script.tickets if number > 2} == {1}, "another group replaces it"


@pytest.mark.parametrize(("finished", "halts"), [(900, True), (1100, False)])
def test_a_run_whose_episodes_are_mostly_refused_halts(finished: int, halts: bool) -> None:
    limit, ledger = FaultLimit(SchedulerSettings(batch_size=4, max_dropped=0)), SampleLedger()
    limit.on_failure(r.SampleFailed("sim", 0, 7, 1, DropReason.EPISODE_REFUSED, "the prompt is too long"))
    ledger.started, ledger.dropped = 1000 + finished, {DropReason.EPISODE_REFUSED: 1000}
    assert not limit.check(ledger), "few"
    ledger.started, ledger.dropped = 1001 + finished, {DropReason.EPISODE_REFUSED: 1001}
    found = [halt.reason for halt in limit.check(ledger)]
    assert (
        found == ["the environment refuses most episodes, 1001 of 1901; the last one: the prompt is too long"] * halts
    )
    limit.forgive(ledger)
    assert not limit.check(ledger), "a resumed run may refuse as many again"


def test_simulators_that_are_lost_together_set_no_healthy_group_aside() -> None:
    """A lost host takes all of its simulators."""
    script = Script(slots=1, max_lag=0, batch_size=3, group_size=3, max_attempts=9, quarantine_after=2)
    for name in ("sim-1", "sim-2"):
        infos = (r.SlotInfo(f"{name}.s", 0, 1),)
        script.say(r.SimulatorJoined(name, 0, (r.EnvBatchInfo(f"{name}.b", infos, True),)))
    assert {ticket.group for ticket in script.tickets.values()} == {0}
    assert len(script.tickets) == 3
    for name in ("sim", "sim-1", "sim-2"):
        assert not notices(script.say(r.StationLost(name, 0, "host lost")))
    assert script.conductor.ledger.dropped == {}


def test_an_episode_whose_simulator_is_lost_each_time_is_set_aside() -> None:
    script = group_of_three(quarantine_after=2)
    assert not notices(script.say(r.StationLost("sim", 0, "killed")))
    script.join_simulator(3, 1, incarnation=1)
    assert len(notices(script.say(r.StationLost("sim", 1, "killed")))) == 1


def hangs(script: Script, bad: tuple[int, int]) -> tuple[list[r.EpisodeSetAside], list[list[tuple[int, int]]]]:
    """One simulator of four rows: whenever the bad start runs, it is lost before any other episode ends; else the
    episodes that run finish. What is set aside, and what ran in each life of the simulator."""
    said, ran, incarnation = [*script.said], [], 0
    for _ in range(40):
        running = [s for s in script.conductor.rollout.samples.values() if s.state == "running"]
        ran.append([sample.ticket.start for sample in running])
        if bad in ran[-1]:
            said += script.say(r.StationLost("sim", incarnation, "hangs"))
            incarnation += 1
            said += script.join_simulator(4, 1, incarnation)
        else:
            for sample in running:
                ticket = sample.ticket
                said += script.say(
                    r.SampleFinished(
                        *("sim", incarnation, ticket.number, ticket.attempt, f"p{ticket.number}"),
                        *(r.SampleEnd.TERMINATED, 1, 1, ticket.version, ticket.version, True, 1.0),
                    )
                )
        if not script.conductor.rollout.rows.live:
            break
    return notices(said), ran


def test_a_start_that_hangs_is_set_aside_without_those_that_ran_beside_it() -> None:
    script = Script(slots=4, max_lag=0, batch_size=4, max_attempts=3, quarantine_after=3, target=1)
    bad = script.tickets[1].start
    found, ran = hangs(script, bad)
    assert [(one.task, one.seed) for one in found] == [bad]
    assert script.conductor.ledger.dropped == {"simulator lost": 1}
    assert [len(starts) for starts in ran[:3]] == [4, 4, 1], "in its last attempt each suspect runs alone"


def test_an_evaluation_loses_the_start_that_hangs_alone() -> None:
    script = Script(slots=4, max_lag=0, batch_size=4, max_attempts=3, quarantine_after=3, target=0)
    episodes = [r.Episode(0, 0, seed, greedy=greedy) for greedy in (True, False) for seed in (5, 6, 7)]
    script.say(r.Evaluate("one", tuple(episodes)))
    found, _ = hangs(script, (0, 6))
    assert [one.seed for one in found] == [6]
    assert not script.conductor.rollout.evaluations.queue, "it ended"
    assert script.conductor.rollout.quarantine.failures == {}
    assert script.conductor.rollout.suspects.order == {}, "it ended"


def test_a_group_that_is_dropped_leaves_no_count() -> None:
    script = Script(slots=1, max_lag=0, batch_size=1, max_attempts=1, quarantine_after=3)
    fails(script, 0)
    assert script.conductor.ledger.dropped == {"environment raised": 1}
    assert not script.conductor.rollout.quarantine.failures


def test_without_the_setting_only_attempts_count() -> None:
    script = group_of_three(quarantine_after=0)
    assert not notices([c for attempt in range(1, 9) for c in fails(script, 0, attempt)])
    assert script.conductor.ledger.dropped == {}


def test_an_extra_member_does_not_save_its_group() -> None:
    script = Script(slots=2, max_lag=0, batch_size=1, group_size=1, extra_members=1, max_attempts=9, quarantine_after=2)
    assert [script.tickets[number].group for number in (0, 1)] == [0, 0]
    fails(script, 0)
    fails(script, 1)
    assert script.conductor.ledger.dropped == {"environment raised": 2}


def test_an_evaluation_drops_what_is_set_aside_and_the_next_one_does_not_start_it() -> None:
    script = Script(slots=1, max_lag=0, batch_size=1, max_attempts=9, quarantine_after=2)
    finishes(script, 0)
    bad, good = r.Episode(0, 0, 7, greedy=True), r.Episode(0, 0, 8, greedy=True)
    script.say(r.Evaluate("one", (bad, good, bad)))
    fails(script, -1)
    finishes(script, -2)
    assert r.EvaluationDone("one", 1, 2) in fails(script, -3), "the first one waited for another attempt"
    said = script.say(r.Evaluate("two", (bad,)))
    assert r.EvaluationDone("two", 0, 1) in said, "nothing is left to wait for"
    resumed = restore_conductor(script.conductor.settings, json.loads(json.dumps(script.conductor.save())))
    assert resumed.summary()["set_aside"] == [{"task": 0, "seed": 7, "reason": "environment raised"}]


def test_a_cluster_with_states_that_never_work_trains_on_the_others() -> None:
    _, summary = run(
        settings(
            scheduler={"batch_size": 8, "group_size": 4, "max_attempts": 50, "quarantine_after": 3, "max_lag": 1.0},
            simulators={"slots": 8, "broken": 0.3},
            versions=12,
        )
    )
    ledger = summary["ledger"]
    assert ledger["trained"] == 96
    assert ledger["dropped"]["environment raised"] % 4 == 0, "groups go whole"
    assert ledger["dropped"]["environment raised"] > 0
