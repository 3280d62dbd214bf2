"""Tiny clusters whose times were worked out by hand."""

import numpy as np
import pytest
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.envs.latency import LatencyBatch, LatencySettings
from polyrhythm.scheduler.records import (
    BatchDone,
    RequestArrived,
    SampleFailed,
    SampleFinished,
    StartRows,
    TrainUntil,
    UpdateDone,
    WeightsApplied,
)

ms = pytest.approx


def test_lock_step_adds_up_every_stage() -> None:
    cluster, summary = run(settings())
    # publish 30, apply 20, reset 50, then three times (serve 6, step 10): 148; update 100: 248; and once more from 248.
    assert times(cluster, WeightsApplied) == ms([0.050, 0.298, 0.546])
    assert times(cluster, RequestArrived) == ms([0.100, 0.116, 0.132, 0.348, 0.364, 0.380])
    assert times(cluster, SampleFinished) == ms([0.148, 0.396])
    assert times(cluster, UpdateDone) == ms([0.248, 0.496])
    assert summary["virtual_s"] == ms(0.546)
    assert summary["utilisation"] == {
        "simulator": ms(2 * 0.080 / 0.546),
        "generator": ms(2 * 0.018 / 0.546),
        "trainer": ms(2 * 0.100 / 0.546),
    }
    assert summary["time"]["generators"]["applying_weights"]["s"] == ms(0.060)
    assert summary["time"]["slots"]["in_batch"]["s"] == ms(0.036)
    assert summary["time"]["slots"]["tickets"]["s"] == ms(0.546 - 0.160 - 0.036)
    assert summary["time"]["trainer"]["samples"]["s"] == ms(0.346)
    none = {"mean": 0.0, "max": 0, "updates_mean": 0.0, "updates_max": 0}
    assert summary["lag"] == {"histogram": {"0": 2}, **none}


def test_with_lag_the_rollout_of_the_next_version_overlaps_the_update() -> None:
    cluster, summary = run(settings(scheduler={"max_lag": 1.0, "on_update": "continue"}))
    # Both tickets are granted at 50 ms, one after the other on the only row: samples at 148 and 148 + 98 = 246.
    assert times(cluster, SampleFinished) == ms([0.148, 0.246])
    assert times(cluster, UpdateDone) == ms([0.248, 0.348])
    assert summary["virtual_s"] == ms(0.398)
    assert summary["lag"]["histogram"] == {"0": 1, "1": 1}


def test_a_first_pass_over_a_part_of_the_samples_overlaps_the_rollout_of_the_others() -> None:
    trainer = {"update": "10ms+20ms", "streamed": 0.5}
    cluster, _ = run(settings(scheduler={"batch_size": 2, "parts": True}, trainer=trainer, versions=1))
    # Samples of 3 transitions at 148 and 246. Half of 20 ms each: until 178 and 276. Then 10 ms, and the other halves.
    assert times(cluster, SampleFinished) == ms([0.148, 0.246])
    assert times(cluster, UpdateDone) == ms([0.276 + 0.010 + 0.060])
    cluster, _ = run(settings(scheduler={"batch_size": 2}, trainer=trainer, versions=1))
    assert times(cluster, UpdateDone) == ms([0.246 + 0.010 + 0.120])


def test_publication_overlaps_the_next_update() -> None:
    cluster, _ = run(settings(scheduler={"max_lag": 1.0, "on_update": "continue"}, trainer={"publish": "90ms"}))
    assert times(cluster, UpdateDone) == ms([0.308, 0.408])
    assert times(cluster, WeightsApplied) == ms([0.110, 0.418, 0.518])


def test_batch_clock_waits_for_a_late_slot_and_a_call_at_its_end_still_boards() -> None:
    # Slot 1 resets second on the shared thread: ready at 150 ms, when the clock of slot 0's request (100 ms) ends.
    scheduler = {"batch_size": 2, "max_wait_s": 0.050}
    cluster, summary = run(
        settings(scheduler=scheduler, simulators={"slots": 2, "shared_thread": True, "steps": 1}, versions=1)
    )
    assert times(cluster, RequestArrived) == ms([0.100, 0.150])
    assert summary["requests"]["batches"] == 1
    # serve 5 + 2, then the steps one after the other
    assert times(cluster, SampleFinished) == ms([0.167, 0.177])
    assert summary["time"]["slots"]["thread"]["s"] == ms(0.050 + 0.010)
    assert summary["time"]["generators"]["batch_clock"]["s"] == ms(0.050)


@pytest.mark.parametrize(("most", "passes"), [(0, 1), (4, 1), (3, 2), (2, 2), (1, 4)])
def test_a_batch_beyond_the_memory_takes_several_passes(most: int, passes: int) -> None:
    cluster, _ = run(settings(simulators={"rows": 4}, generators={"most_rows": most}, scheduler={"batch_size": 4}))
    # publish 30, apply 20, reset 50, then three times: 5 for each pass and 4 rows of 1, a step of 10
    assert times(cluster, UpdateDone)[0] == ms(0.100 + 3 * (0.005 * passes + 0.004 + 0.010) + 0.100)


def test_slots_step_beside_each_other_unless_they_share_a_thread() -> None:
    cluster, _ = run(settings(scheduler={"batch_size": 2}, simulators={"slots": 2, "steps": 1}, versions=1))
    assert times(cluster, RequestArrived) == ms([0.100, 0.100])
    assert times(cluster, SampleFinished) == ms([0.117, 0.117])


def test_rows_of_a_slot_reset_and_ask_together_and_a_row_granted_meanwhile_joins_the_next_request() -> None:
    # Two rows, three tickets: the third goes to row 0, which ends (with row 1) after one step.
    cluster, _ = run(
        settings(scheduler={"batch_size": 3}, simulators={"rows": 2, "steps": 1, "reset": "50ms"}, versions=1)
    )
    asked = [step.event for step in cluster.driver.steps if isinstance(step.event, RequestArrived)]
    assert [event.rows for event in asked] == [2, 1]
    assert times(cluster, RequestArrived) == ms([0.100, 0.117 + 0.050])


def test_a_full_segment_parks_the_row_and_its_continuation_needs_no_reset() -> None:
    scheduler = {"batch_size": 1, "segments": True, "max_lag": 2.0}
    cluster, summary = run(settings(scheduler=scheduler, simulators={"segment_steps": 2}, versions=2))
    ended = [step.event for step in cluster.driver.steps if isinstance(step.event, SampleFinished)]
    assert [(event.end.value, event.chunk_steps) for event in ended] == [("segment", 2), ("terminated", 1)]
    assert times(cluster, SampleFinished) == ms([0.132, 0.148])
    grants = [g for s in cluster.driver.steps for c in s.commands if isinstance(c, StartRows) for g in c.grants]
    assert [grant.resume for grant in grants] == [False, True]
    assert summary["throughput"]["transitions"] == 3


def test_a_chunk_step_makes_several_transitions_and_the_last_one_fewer() -> None:
    _, summary = run(settings(simulators={"steps": 7, "chunk": 3}, versions=1))
    assert summary["throughput"]["transitions"] == 7
    assert summary["throughput"]["chunk_steps"] == 3


def test_episode_time_is_shared_by_its_steps() -> None:
    cluster, _ = run(settings(simulators={"steps": 4, "chunk": 2, "episode_time": "1s"}, versions=1))
    assert times(cluster, RequestArrived) == ms([0.100, 0.606])
    assert times(cluster, SampleFinished) == ms([1.112])


def test_a_step_that_raises_loses_the_sample_and_the_ticket_goes_out_again() -> None:
    cluster, summary = run(settings(simulators={"raises": 0.2}, versions=6, scheduler={"max_attempts": 50}))
    assert times(cluster, SampleFailed)
    assert summary["ledger"]["trained"] == 6
    assert summary["ledger"]["dropped"] == {}


def test_a_step_that_outlasts_the_deadline_is_cancelled_when_it_is_over() -> None:
    simulators = {"steps": 2, "step": "mixture:0.5*constant:10ms+0.5*constant:700ms"}
    cluster, summary = run(
        settings(scheduler={"episode_deadline_s": 0.5, "max_attempts": 50}, simulators=simulators, versions=8)
    )
    reasons = {step.event.reason for step in cluster.driver.steps if isinstance(step.event, SampleFailed)}
    assert reasons == {"cancelled"}
    assert summary["ledger"]["trained"] == 8


def test_a_second_target_continues_the_run() -> None:
    cluster, _ = run(settings(versions=1))
    cluster.driver.submit(TrainUntil(2))
    cluster.driver.run(2)
    assert times(cluster, UpdateDone) == ms([0.248, 0.248 + 0.050 + 0.098 + 0.100])


@pytest.mark.parametrize(("depth", "ends"), [(1, [0.023, 0.046, 0.069, 0.092]), (2, [0.023, 0.043, 0.063, 0.083])])
def test_at_depth_2_a_full_batch_is_gathered_during_the_pass_before_it(depth: int, ends: list[float]) -> None:
    cluster, summary = run(
        settings(
            scheduler={"batch_size": 4, "max_rows": 2},
            simulators={"env_batches": 4, "reset": "0ms", "step": "1ms", "steps": 2},
            generators={"depth": depth, "gather": "3ms", "serve": "20ms", "apply": "0ms"},
            trainer={"publish": "0ms"},
            versions=1,
        )
    )
    # Two of the four slots ask again 1 ms after their pass, when the batch of the other two has begun.
    assert times(cluster, BatchDone) == ms(ends)
    assert summary["requests"]["batches"] == 4
    assert summary["time"]["generators"]["serving"]["s"] == ms(ends[-1])


def test_what_is_not_gathered_by_the_end_of_the_pass_is_waited_for() -> None:
    cluster, _ = run(
        settings(
            scheduler={"batch_size": 4, "max_rows": 2},
            simulators={"env_batches": 4, "reset": "0ms", "step": "18ms", "steps": 2},
            generators={"depth": 2, "gather": "1ms+1ms", "serve": "20ms", "apply": "0ms"},
            trainer={"publish": "0ms"},
            versions=1,
        )
    )
    # The first two ask again at 23 + 18 = 41 ms: gathered at 44 ms, 1 ms after the end of the second pass.
    assert times(cluster, BatchDone) == ms([0.023, 0.043, 0.064, 0.084])


def test_times_by_seed_are_those_of_the_synthetic_environment() -> None:
    law = "lognormal:10ms:0.8"
    simulators = {"step": law, "reset": "0ms", "rows": 2, "reset_rows": False, "times_by": "seed"}
    cluster, _ = run(settings(scheduler={"batch_size": 2}, simulators=simulators, versions=3))
    slept: list[float] = []
    batch = LatencyBatch(LatencySettings(step_time=law, times_by="seed"), 2, slept.append)
    for step in cluster.driver.steps:
        for start in step.commands:
            if isinstance(start, StartRows):
                batch.reset([g.row for g in start.grants], [0, 0], [g.ticket.seed for g in start.grants])
                for _ in range(3):
                    batch.step(range(2), np.zeros((2, 7)))
    ends = times(cluster, RequestArrived) + times(cluster, SampleFinished)
    steps = [min(end for end in ends if end > begin) - begin for begin in times(cluster, BatchDone)]
    assert steps == ms([seconds for seconds in slept if seconds][: len(steps)])
    assert len(steps) == 9
