"""The mover and its conductor: accounts of tries, lost stations, faults, restores and resumed runs."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from tests.oracles.guarantees import GuaranteeChecker
from tests.oracles.replay import first_difference
from tests.plugins.moves.scenes import OFF, WatchedRun, judged, lying, moving, scene

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.mover import MoveTrial
from polyrhythm.plugins.moves.operation import Operation
from polyrhythm.plugins.moves.search import MoveForecast, MoveSearch
from polyrhythm.plugins.moves.timing import MeasuredTimes
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.scheduler.records import DropReason, MoveChosen, SampleFailed, StationLost, TrainUntil
from polyrhythm.scheduler.settings import MoveRules

FORECAST_TIMES = MeasuredTimes({}, {}, (), {}, 0.0, 0.0, 0.0, {0: 1.0}, 0.0, {}, 0)


def test_what_kept_moves_have_saved_is_no_credit_for_tries() -> None:
    """Versions of 1 s, each 0.5 s shorter than before: the loss of a try is made good, and no more."""
    mover = lying(20.0).mover
    mover.saved_s, mover.lost_s, mover.next_search = 0.5, 3.0, 999
    lost = []
    for version in range(40):
        mover.on_published(float(version), mover.settings.limits)
        lost.append(mover.lost_s)
    assert min(lost) == lost[-1] == 0.0
    assert lost == sorted(lost, reverse=True)
    assert lost[0] == 3.0


def test_a_move_to_fresher_samples_that_is_kept_at_a_lower_rate_saves_nothing() -> None:
    """Kept down to 0.99 of the rate; the next search still waits for the share of tries to grow."""
    mover = lying(20.0).mover
    for now in (0.0, *(1.0 + 1.009 * version for version in range(20))):
        if now == 1.0:
            mover.trial = MoveTrial(Operation((), 2.0), 32.0, 1.0, fresher=True)
            mover.next_search = 999
        mover.on_published(now, mover.settings.limits)
    assert mover.trial is None
    assert not mover.barred
    assert mover.saved_s == 0.0
    mover.lost_s, mover.search = 30.0, MoveSearch(FORECAST_TIMES, mover.settings.limits, now, [])
    mover.search.found = {mover.operation: MoveForecast(32.0, 2.0), Operation(OFF, 2.0): MoveForecast(64.0, 2.0)}
    assert mover.on_published(now + 1.009, mover.settings.limits) == []
    assert mover.trial is None
    assert mover.next_search > mover.versions + 1


def in_a_try(now: float = 2.0) -> tuple[MovingConductor, float]:
    """A conductor in the middle of a try whose present version has taken too long; the time."""
    conductor = lying(18.5)
    cluster = VirtualCluster(scene(trainer={"update": "4000ms", "devices": "1"}), conductor)
    cluster.driver.submit(TrainUntil(50))
    cluster.driver.run(50, now)
    mover = conductor.mover
    mover.trial, mover.last, mover.disturbed = MoveTrial(Operation(OFF, 2.0), 60.0, 1.1, fresher=False), 0.0, False
    return conductor, cluster.driver.clock.now


def test_an_event_of_a_lost_station_moves_nothing() -> None:
    conductor, now = in_a_try()
    assert conductor.handle(SampleFailed("simulator-0", 99, 0, 0, DropReason.CANCELLED), now) == []
    assert conductor.chosen == []
    assert conductor.mover.trial is not None
    assert conductor.stations.refused == 1
    (move, *_) = conductor.handle(StationLost("simulator-0", 0, "dies"), now)
    assert isinstance(move, MoveChosen)
    assert move.outcome == "undone"
    assert conductor.serving.generators.live == ["generator-0"]


@pytest.mark.parametrize(
    ("station", "reasons", "left"),
    [
        ("trainer", ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",), 16),
        ("generator-0", ("was ended by SIGKILL",), 16),
        ("trainer", ("was ended by SIGKILL", "MemoryError", "MemoryError"), 8),
        ("trainer", ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED",), 16),
        ("trainer", ("RuntimeError: DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes",), 16),
        ("trainer", ("ValueError: the loss is nan",), 32),
        ("trainer", ("ImportError: cannot allocate static TLS block",), 32),
        ("trainer", ("hangs", "hangs"), 16),
        ("simulator-0", ("was ended by SIGKILL",), 32),
    ],
)
def test_kept_micro_batches_are_undone_and_barred_once_memory_lacks(
    station: str, reasons: tuple[str, ...], left: int
) -> None:
    """Of 8 chunk steps, then 16, then 32: each loss goes back to the size before, if memory is or may be its reason."""
    settings = replace(scene().scheduler, moves=MoveRules({}, 8, (8, 16, 32)))
    conductor = judged(settings, lambda one: 20.0 + one.micro_batch)
    now = WatchedRun(scene(versions=4), conductor=conductor).cluster.driver.clock.now
    mover, sizes = conductor.mover, (8, 16, 32)
    *mover.roomier, mover.operation = (Operation((), 2.0, size) for size in sizes)
    for number, reason in enumerate(reasons):
        moves = conductor.handle(StationLost(station, number, reason), now)
        conductor.stations.incarnations[station] = number + 1  # the next one has joined
        if station == "trainer":
            conductor.updates.trainer = station
    again = judged(settings, lambda _: 20.0)
    again.load(json.loads(json.dumps(conductor.save())))
    again.detach()
    assert again.mover.operation.micro_batch == left
    assert {one.micro_batch for one in again.mover.failed} == {size for size in sizes if size > left}
    assert [one.micro_batch for one in again.mover.roomier] == [size for size in sizes if size < left]
    assert [move.outcome for move in conductor.chosen] == ["undone"] * sum(size > left for size in sizes)
    if left == 16:
        assert isinstance(moves[0], MoveChosen)
        assert (moves[0].move, conductor.updates.micro_batch) == ("micro_batch_steps 32 → 16", 16)
        assert f"{station} was lost" in moves[0].reason


def test_a_try_that_an_interruption_ends_is_given_up() -> None:
    conductor, _ = in_a_try()
    conductor.mover.lost_s = 30.0
    conductor.detach()
    mover = conductor.mover
    assert (mover.operation, mover.trial, mover.lost_s) == (Operation(OFF, 2.0), None, 0.0)
    assert mover.skip == mover.catch_up


def test_a_lost_station_spoils_the_measurement_of_its_version() -> None:
    conductor = lying(20.0)
    WatchedRun(scene(versions=4), conductor=conductor)
    conductor.handle(StationLost("simulator-0", 0, "dies"), 100.0)
    assert conductor.mover.disturbed


def test_a_search_waits_while_the_generators_that_are_on_are_lost() -> None:
    """Generator-1 is off when generator-0 is lost for some versions, in which a search would begin."""
    fault = {"station": "generator-0", "at": "20s", "detected": "0.1s", "restart": "20s"}
    run = WatchedRun(moving(scene(versions=34, faults=[fault])))
    assert [move.move for _, move in run.chosen[:2]] == ["generator-1 off", "generator-1 off"]
    assert max(run.published) == 34


@pytest.mark.parametrize("seed", [0, 1])
def test_with_faults_every_sample_is_trained_once_and_no_guarantee_breaks(seed: int) -> None:
    rng = random.Random(seed)
    stations = ("simulator-0", "generator-0", "generator-1", "generator-1")
    faults = [
        {"station": rng.choice(stations), "at": 1.5 * turn, "detected": "0.1s", "restart": "0.3s"}
        for turn in range(1, 26)
    ]
    settings = scene(faults=faults, versions=36)
    conductor = lying(20.0)
    cluster = VirtualCluster(settings, conductor)
    watch = GuaranteeChecker(cluster, conductor.inner)
    cluster.run()
    watch.finish()
    assert cluster.driver.measures.lost >= 20
    assert conductor.ledger.trained == 36 * 32
    assert conductor.ledger.dropped_total == 0


def test_the_same_events_give_the_same_moves_also_after_a_restore_at_any_time() -> None:
    run = WatchedRun(scene(versions=40), conductor=lying(22.0), record=True)
    steps = run.cluster.driver.steps
    assert any(isinstance(command, MoveChosen) for step in steps for command in step.commands)
    assert first_difference(lying(22.0), steps) is None
    conductor, rng = lying(22.0), random.Random(0)
    for step in steps:
        if rng.random() < 0.01:
            saved = json.loads(json.dumps(conductor.save()))
            conductor = lying(22.0)
            conductor.load(saved)
        assert tuple(conductor.handle(step.event, step.now)) == step.commands
        conductor.deadline()


def test_a_search_goes_on_after_a_restore_where_it_was() -> None:
    settings = moving(scene(versions=14))
    run = WatchedRun(settings, record=True)
    steps = run.cluster.driver.steps
    conductor = build_conductor(settings.scheduler)
    restored = 0
    for step in steps:
        assert isinstance(conductor, MovingConductor)
        search = conductor.mover.search
        if search is not None and search.slices == 7 and not restored:
            conductor = restore_conductor(settings.scheduler, json.loads(json.dumps(conductor.save())))
            restored += 1
        assert tuple(conductor.handle(step.event, step.now)) == step.commands
    assert restored
    assert any(isinstance(command, MoveChosen) for step in steps for command in step.commands)


def test_a_resumed_run_keeps_its_operation() -> None:
    run = WatchedRun(moving(scene(versions=20)))
    conductor = run.conductor
    assert isinstance(conductor, MovingConductor)
    assert conductor.mover.operation.off == OFF
    conductor.detach()
    again = restore_conductor(conductor.settings, json.loads(json.dumps(conductor.save())))
    assert isinstance(again, MovingConductor)
    assert again.mover.operation.off == OFF
    assert again.summary()["moves"] == []
    assert again.mover.operation.max_lag == 2.0


def test_a_run_that_is_resumed_without_moves_has_all_generators_and_its_own_bound() -> None:
    conductor = WatchedRun(moving(scene(versions=30))).conductor
    assert conductor.serving.generators.off == OFF
    plain = scene().scheduler
    again = restore_conductor(plain, json.loads(json.dumps(conductor.save())))
    assert again.serving.generators.off == ()
    assert again.rollout.max_lag == plain.max_lag
