"""`batching: auto` in small: it tries sizes, chooses once there is reason to, says so, and goes on after a restore."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.oracles.replay import first_difference

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.autobatch.tuning import BatchTuner
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.records import BatchingChosen, Request, Serve, TrainUntil
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings
from polyrhythm_bench.workloads.batching_scenario import BatchingScenario, cluster_of

AUTO = SchedulerSettings(64, max_lag=1e6, bound="mean", batching="auto", max_rows=64)


def told(
    scene: BatchingScenario, scheduler: SchedulerSettings = AUTO, seconds: float = 10.0
) -> tuple[VirtualCluster, list[BatchingChosen]]:
    cluster = cluster_of(scene, scheduler, seed=0, record=True)
    cluster.driver.submit(TrainUntil(10**9))
    cluster.driver.run(10**9, seconds)
    commands = [command for step in cluster.driver.steps for command in step.commands]
    return cluster, [command for command in commands if isinstance(command, BatchingChosen)]


def test_before_anything_is_known_passes_of_different_sizes_are_tried_and_none_waits() -> None:
    tuning = BatchTuner.begin(AUTO)
    assert tuning.limits == BatchLimits(64, 1_000_000, 0.0)
    requests = [Request(f"s{slot}", "sim", 1, 2, 0, "", 0.0) for slot in range(8)]
    tried = []
    for turn in range(12):
        for request in requests:
            tuning.on_request(request, turn + 0.5)
        tuning.on_pass_started("g0", requests, turn + 0.5)
        tuning.on_pass_finished("g0", [request.slot for request in requests], turn + 0.6, 1)
        tried.append(tuning.limits.max_rows)
        assert tuning.limits.max_wait_s == 0.0
    assert {16, 8, 4, 2} <= set(tried)


@pytest.mark.parametrize(
    ("scene", "requests", "waits"),
    [
        # A pass costs three times a step, whoever is in it: everybody waits for everybody.
        (BatchingScenario(16, 1, 1, "constant:10ms", "30ms+0.01ms"), 16, True),
        # Every row costs the same: nothing is gained by waiting.
        (BatchingScenario(16, 1, 1, "lognormal:10ms:0.8", "0.1ms+2ms"), None, False),
    ],
)
def test_it_waits_where_company_pays_and_only_there(scene: BatchingScenario, requests: int | None, waits: bool) -> None:
    _, chosen = told(scene)
    assert (chosen[-1].max_wait_s > 0.010) is waits
    assert requests in (None, chosen[-1].max_requests)
    assert "a pass takes" in chosen[-1].reason
    assert len(chosen) <= 2, "it does not change its mind without a reason"


def test_batches_fill_the_buckets_that_passes_are_padded_to() -> None:
    scene = BatchingScenario(20, 1, 1, "constant:10ms", "2ms+1ms", padded=True)
    _, chosen = told(scene, replace(AUTO, buckets=(1, 2, 4, 8, 16, 32)))
    assert chosen[-1].max_requests in (4, 8, 16), "20 requests would take as long as 32"


def test_max_rows_of_the_settings_is_never_exceeded() -> None:
    cluster, chosen = told(BatchingScenario(16, 4, 1, "constant:10ms", "30ms+0.01ms"), replace(AUTO, max_rows=24))
    batches = [c.batch for step in cluster.driver.steps for c in step.commands if isinstance(c, Serve)]
    assert max(sum(request.rows for request in batch.requests) for batch in batches) <= 24
    assert chosen[-1].max_rows <= 24


def test_a_change_is_answered_by_another_choice() -> None:
    scene = BatchingScenario(16, 1, 1, "constant:10ms", "0.1ms+2ms", later_serve="30ms+0.01ms")
    _, chosen = told(scene, seconds=30.0)
    assert chosen[0].max_wait_s < 0.010 < chosen[-1].max_wait_s


def test_the_same_events_give_the_same_choices_also_after_a_restore() -> None:
    cluster, chosen = told(BatchingScenario(8, 2, 2, "lognormal:10ms:0.8", "10ms+0.1ms"), seconds=4.0)
    assert chosen
    steps = cluster.driver.steps
    assert first_difference(build_conductor(AUTO), steps) is None
    half = len(steps) // 2
    conductor = build_conductor(AUTO)
    assert first_difference(conductor, steps[:half]) is None
    restored = restore_conductor(AUTO, json.loads(json.dumps(conductor.save())))
    assert first_difference(restored, steps[half:]) is None


def test_a_resumed_run_keeps_what_was_learned_and_begins_its_clock_anew() -> None:
    cluster, _ = told(BatchingScenario(8, 2, 2, "lognormal:10ms:0.8", "10ms+0.1ms"), seconds=4.0)
    conductor = cluster.conductor
    assert isinstance(conductor, Conductor)
    before = conductor.serving.tuning
    assert before is not None
    limits, seconds = before.limits, before.timing.pass_time.mean_s
    conductor.detach()
    tuning = conductor.serving.tuning
    assert tuning is before
    assert (tuning.limits, tuning.timing.pass_time.mean_s) == (limits, seconds)
    assert (tuning.timing.slots, tuning.timing.running, tuning.search, tuning.next_search_at) == ({}, {}, None, 0.0)


def test_others_than_auto_learn_nothing_and_say_nothing() -> None:
    for batching in ("dynamic", "lockstep"):
        conductor = build_conductor(replace(AUTO, batching=batching))
        assert conductor.serving.tuning is None
        assert conductor.serving.limits == conductor.settings.limits
        assert conductor.summary() == {"groups": {}, "set_aside": []}


def test_the_summary_has_the_last_choice_and_why() -> None:
    cluster, chosen = told(BatchingScenario(8, 2, 2, "lognormal:10ms:0.8", "10ms+0.1ms"), seconds=4.0)
    assert isinstance(cluster.conductor, Conductor)
    found = cluster.conductor.summary()["batching"]
    assert found["reason"] == chosen[-1].reason
    assert found["max_wait_s"] == chosen[-1].max_wait_s


def played(tuning: BatchTuner, turns: int, *, overtaking: bool = False, bound: bool = False) -> None:
    """Two generators, eight slots each, which all ask, are served, and come back, `turns` times."""
    for turn in range(turns):
        for number in range(2):
            generator = f"g{number}"
            own = [
                Request(f"s{number}.{slot}", "sim", turn, 1, 0, "", 0.0, generator if bound else None)
                for slot in range(8)
            ]
            for request in [] if overtaking and turn else own:
                tuning.on_request(request, turn + 0.1)
            tuning.on_pass_started(generator, own, turn + 0.1)
            for request in own if overtaking else []:
                tuning.on_request(request, turn + 0.9)  # answered, and back before the report that it was
            tuning.on_pass_finished(generator, [] if overtaking else [request.slot for request in own], turn + 0.9, 2)


@pytest.mark.parametrize(("bound", "slots", "generators"), [(False, 16, 2), (True, 8, 1)])
def test_slots_that_belong_to_a_generator_are_forecast_with_it_alone(bound: bool, slots: int, generators: int) -> None:
    tuning = BatchTuner.begin(AUTO)
    played(tuning, 20, bound=bound)
    assert tuning.search is not None
    assert (len(tuning.search.loop.rows), tuning.search.loop.generators) == (slots, generators)


def test_answers_that_overtake_the_report_are_learned_from_too() -> None:
    tuning = BatchTuner.begin(AUTO)
    played(tuning, 20, overtaking=True)
    assert tuning.search is not None
    assert all(set(slot.absences_s) == {0.0} for slot in tuning.timing.slots.values())


def test_nothing_is_forecast_from_the_few_slots_that_are_back_first() -> None:
    tuning = BatchTuner.begin(AUTO)
    played(tuning, 20)
    for slot in list(tuning.timing.slots):
        tuning.remove_slot(slot)
    tuning.restart_clock()
    fresh = [Request(f"n{slot}", "sim", 0, 1, 0, "", 0.0) for slot in range(16)]
    for request in fresh:
        tuning.on_request(request, 30.0)
    for turn in range(4):
        tuning.on_pass_started("g0", fresh[:3], 31.0 + turn)
        tuning.on_pass_finished("g0", [request.slot for request in fresh[:3]], 31.2 + turn, 2)
        for request in fresh[:3]:
            tuning.on_request(request, 31.5 + turn)
    assert tuning.search is None, "three of sixteen slots are known"


def test_another_number_of_generators_ends_a_search_for_the_old_one() -> None:
    tuning = BatchTuner.begin(AUTO)
    played(tuning, 20)
    before = tuning.search
    assert before is not None
    request = Request("s0.0", "sim", 99, 1, 0, "", 0.0)
    tuning.on_request(request, 21.0)
    tuning.on_pass_started("g0", [request], 21.0)
    tuning.on_pass_finished("g0", ["s0.0"], 21.1, 1)
    assert tuning.search is not before
    assert tuning.search is not None
    assert tuning.search.loop.generators == 1
