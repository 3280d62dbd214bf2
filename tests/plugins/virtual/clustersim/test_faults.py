"""Stations die and hang; every guarantee is watched while they do. Also the faults that once broke one."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.scheduler.records import (
    GeneratorJoined,
    PublishWeights,
    RefuseRequest,
    RequestArrived,
    Serve,
    SimulatorJoined,
    StartUpdate,
    StationLost,
    TrainerJoined,
    UpdateDone,
)

ASYNCHRONOUS: dict[str, Any] = {"max_lag": 1.0, "on_update": "continue", "max_attempts": 100}


def fault(station: str, at: str, **rest: Any) -> dict[str, Any]:
    return {"station": station, "at": at, "detected": "40ms", "restart": "60ms", **rest}


def test_a_dead_simulator_is_noticed_restarts_and_its_ticket_runs_again() -> None:
    cluster, summary = run(settings(faults=[fault("simulator-0", "120ms")], versions=1))
    assert times(cluster, StationLost) == pytest.approx([0.160])
    assert times(cluster, SimulatorJoined) == pytest.approx([0.0, 0.220])
    # reset 50, three times 16, update 100, publish 30, apply 20
    assert summary["virtual_s"] == pytest.approx(0.220 + 0.098 + 0.150)
    assert summary["down_s"] == {"simulator": pytest.approx(0.100), "generator": 0.0, "trainer": 0.0}
    assert summary["stations_lost"] == 1
    assert summary["ledger"]["started"] == summary["ledger"]["trained"] == 1
    lived = summary["virtual_s"] - 0.100
    assert sum(state["s"] for state in summary["time"]["slots"].values()) == pytest.approx(lived)


def test_a_dead_generators_batch_is_served_again_with_its_old_arrival_time() -> None:
    cluster, summary = run(settings(faults=[fault("generator-0", "102ms")], versions=1))
    assert times(cluster, GeneratorJoined) == pytest.approx([0.0, 0.202])
    served = [c for step in cluster.driver.steps for c in step.commands if isinstance(c, Serve)]
    assert [request.sequence for serve in served for request in serve.batch.requests] == [1, 1, 2, 3]
    assert [request.arrived for serve in served[:2] for request in serve.batch.requests] == pytest.approx(
        [0.100, 0.100]
    )
    assert summary["requests"]["arrived"] == 3


def test_a_hang_is_silence_until_it_is_noticed() -> None:
    hang = fault("generator-0", "102ms", kind="hangs", detected="2s")
    cluster, _ = run(settings(faults=[hang], versions=1))
    assert times(cluster, StationLost) == pytest.approx([2.102])


def test_a_second_failure_of_a_station_that_is_down_changes_nothing() -> None:
    once = run(settings(faults=[fault("simulator-0", "120ms")]))[1]
    twice = run(settings(faults=[fault("simulator-0", "120ms"), fault("simulator-0", "130ms")]))[1]
    assert once == twice


def test_a_dead_trainer_restarts_from_its_checkpoint_and_what_it_trained_since_is_rolled_back() -> None:
    # Updates end at 248, 348, 514, 614 ms; at 560 ms the checkpoint has two of the three that are done.
    cluster, summary = run(
        settings(
            scheduler=ASYNCHRONOUS,
            trainer={"checkpoint_every": 2},
            faults=[fault("trainer", "560ms")],
            versions=5,
        )
    )
    joined = [step.event for step in cluster.driver.steps if isinstance(step.event, TrainerJoined)]
    assert [event.updates for event in joined] == [0, 2]
    assert summary["ledger"]["rolled_back"] == 1
    published = [c.version for step in cluster.driver.steps for c in step.commands if isinstance(c, PublishWeights)]
    assert published == sorted(set(published)), "versions never go back"


def test_random_failures_come_at_random_and_the_run_goes_on() -> None:
    mortal = {"mean_life": "1s", "detected": "20ms", "restart": "50ms"}
    cluster, summary = run(
        settings(
            scheduler=ASYNCHRONOUS, simulators=mortal, generators=mortal, trainer={"checkpoint_every": 1}, versions=40
        )
    )
    assert summary["stations_lost"] > 3
    assert cluster.driver.reached == 40
    assert 0 < summary["down_s"]["simulator"] < summary["virtual_s"]


# ---------------------------------------------------------------- faults that once broke a guarantee


def test_a_generator_that_dies_after_its_replies_leaves_slots_that_ask_again() -> None:
    cluster, summary = run(settings(faults=[fault("generator-0", "102ms", after_reply=True)], versions=1))
    # The reply went out at 102 ms, so the slot asks for its second step at 112 ms, before the loss is noticed.
    assert times(cluster, RequestArrived)[:2] == pytest.approx([0.100, 0.112])
    assert summary["ledger"]["trained"] == 1


def test_an_answered_request_of_a_lost_generator_does_not_stop_the_lock_step() -> None:
    # One step per episode: when the generator's loss is noticed the samples are finished and nobody waits for a reply.
    dies = fault("generator-0", "103ms", after_reply=True)
    scheduler = {"batch_size": 2, "batching": "lockstep"}
    cluster, summary = run(settings(scheduler=scheduler, simulators={"slots": 2, "steps": 1}, faults=[dies]))
    refused = [c for step in cluster.driver.steps for c in step.commands if isinstance(c, RefuseRequest)]
    assert len(refused) == 2
    assert summary["ledger"]["trained"] == 4


def test_a_report_that_its_slots_next_request_overtakes_is_no_second_answer() -> None:
    cluster, summary = run(
        settings(
            scheduler={"batch_size": 8, "max_lag": 2.0, "on_update": "continue"},
            simulators={"slots": 8, "step": "0ms", "reset": "0ms", "steps": 6},
            message_delay="lognormal:10ms:1.5",
            versions=4,
        )
    )
    assert cluster.driver.reached == 4
    assert summary["requests"]["arrived"] == summary["requests"]["served"]


def test_a_simulator_may_take_several_members_of_a_group_with_it() -> None:
    # max_attempts 1: the first lost member drops the group; the others ran on slots that are gone as well.
    scheduler = {"batch_size": 4, "group_size": 4, "max_attempts": 1}
    _, summary = run(settings(scheduler=scheduler, simulators={"slots": 4}, faults=[fault("simulator-0", "120ms")]))
    assert summary["ledger"]["dropped"] == {"simulator lost": 4}
    assert summary["ledger"]["trained"] == 8


def test_a_trainer_lost_before_its_version_was_published_costs_no_sample() -> None:
    # The same, but version 1 is still being published: nobody has seen it, so the count goes back and nothing is late.
    cluster, summary = run(
        settings(
            scheduler={"batch_size": 2, "sync_interval": 2, "max_lag": 1.0, "on_update": "continue"},
            simulators={"slots": 8, "steps": 1},
            faults=[fault("trainer", "330ms")],
            versions=4,
        )
    )
    published = [c.version for step in cluster.driver.steps for c in step.commands if isinstance(c, PublishWeights)]
    assert published[:3] == [0, 1, 1]
    assert summary["ledger"]["rolled_back"] > 0
    assert summary["ledger"]["dropped"] == {}


def test_after_a_rollback_samples_of_version_zero_that_are_past_their_deadline_are_dropped() -> None:
    # K=2, α=1: the trainer dies after version 1 was published, without a checkpoint, and comes back as version 2.
    # Samples of version 0, whose deadline was version 1, wait in the buffer.
    cluster, summary = run(
        settings(
            scheduler={"batch_size": 2, "sync_interval": 2, "max_lag": 1.0, "on_update": "continue"},
            simulators={"slots": 8, "steps": 1},
            faults=[fault("trainer", "370ms")],
            versions=4,
        )
    )
    lent = [c for step in cluster.driver.steps for c in step.commands if isinstance(c, StartUpdate)]
    assert max(command.version - oldest for command in lent for oldest in command.oldest) <= 1
    assert summary["ledger"]["rolled_back"] > 0
    assert "rollback" in summary["ledger"]["dropped"]


def test_an_incarnation_that_joins_after_its_successor_is_refused() -> None:
    cluster, _ = run(settings(versions=1))
    conductor = cluster.conductor
    steps = len(cluster.driver.steps)
    cluster.driver.submit(GeneratorJoined("generator-0", incarnation=5))
    cluster.driver.submit(GeneratorJoined("generator-0", incarnation=4))
    cluster.driver.run(version=-1)
    first, second = cluster.driver.steps[steps:]
    assert first.commands
    assert not second.commands
    assert conductor.stations.refused == 1  # type: ignore[attr-defined]


def test_updates_are_counted_once_however_often_the_trainer_dies() -> None:
    faults = [fault("trainer", f"{at}ms") for at in range(260, 2000, 310)]
    cluster, summary = run(settings(scheduler=ASYNCHRONOUS, trainer={"checkpoint_every": 1}, faults=faults, versions=8))
    assert summary["ledger"]["trained"] == 8
    assert len(times(cluster, UpdateDone)) == 8 + summary["ledger"]["rolled_back"]
