"""Moves in the simulated cluster: they follow the costs, cost little when a forecast is wrong, and can be replayed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest
from tests.long import long
from tests.oracles.guarantees import GuaranteeChecker
from tests.oracles.replay import first_difference
from tests.plugins.moves.scenes import WatchedRun, judged, moving, scene

from polyrhythm.conductors import build_conductor, restore_conductor
from polyrhythm.plugins.moves.conductor import MovingConductor
from polyrhythm.plugins.moves.judge import OperationJudge
from polyrhythm.plugins.moves.mover import MoveTrial
from polyrhythm.plugins.moves.operation import Operation, neighbours, starting
from polyrhythm.plugins.moves.search import MoveForecast, MoveSearch
from polyrhythm.plugins.moves.timing import FIXED, MeasuredTimes, RunTiming
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import (
    Batch,
    BatchDone,
    DropReason,
    EnvBatchInfo,
    GeneratorJoined,
    MoveChosen,
    Request,
    SampleFailed,
    Serve,
    SimulatorJoined,
    SlotInfo,
    StartUpdate,
    StationLost,
    TakeDevice,
    TrainUntil,
    UpdateDone,
)
from polyrhythm.scheduler.settings import MoveRules, SchedulerSettings

#: Versions within which moves have followed a change of costs.
FOLLOWED = 20
OFF = ("generator-1",)
FORECAST_TIMES = MeasuredTimes({}, {}, (), {}, 0.0, 0.0, 0.0, {0: 1.0}, 0.0, {}, 0)


def phases(settings: ClusterSettings, runs: dict[str, WatchedRun]) -> list[dict[str, float]]:
    """Samples per second of each run in each phase, from 20 versions after its beginning on."""
    times = [0.0, *sorted({change.at for change in settings.changes})]
    found = []
    for index, begin in enumerate(times):
        rates = {}
        for name, run in runs.items():
            last = run.at(times[index + 1]) - 1 if index + 1 < len(times) else settings.versions - 4
            rates[name] = run.rate(run.at(begin) + FOLLOWED, last)
        found.append(rates)
    return found


def check_phases(settings: ClusterSettings) -> list[tuple[int, MoveChosen]]:
    """Each phase is within 5% of the better fixed operation, the whole no worse than the start; returns the moves."""
    fixed = {"start": WatchedRun(settings), "off": WatchedRun(settings, OFF)}
    moved = WatchedRun(moving(settings))
    for rates in phases(settings, {**fixed, "moved": moved}):
        assert rates["moved"] >= 0.95 * max(rates["start"], rates["off"]), rates
    last = settings.versions - 4
    assert moved.rate(0, last) >= 0.97 * fixed["start"].rate(0, last)
    return moved.chosen


def test_moves_follow_passes_that_become_three_times_as_fast() -> None:
    slow = {"serve": "12ms+6ms"}
    generators = [{**slow, "devices": "0"}, {**slow, "devices": "1"}]
    changes = [{"at": "56s", "cost": "serve", "times": 0.333}]
    chosen = check_phases(scene(generators=generators, changes=changes, versions=78))
    begun = [move for _, move in chosen if move.outcome == "begun" and "generator-1" in move.move]
    assert [move.move for move in begun] == ["generator-1 off"]
    assert "a pass takes" in begun[0].reason
    assert begun[0].expected > 1.1


@long(20, "moves follow passes that become three times as slow, and fast again")
def test_moves_follow_passes_that_become_slow_and_fast_again() -> None:
    changes = [{"at": "50s", "cost": "serve", "times": 3.0}, {"at": "120s", "cost": "serve", "times": 1.0}]
    chosen = check_phases(scene(changes=changes, versions=130))
    kept = [move.move for _, move in chosen if move.outcome == "kept" and "generator-1" in move.move]
    assert kept == ["generator-1 off", "generator-1 on", "generator-1 off"]


@long(20, "moves follow updates that become three times as slow, and fast again")
def test_moves_follow_updates_that_become_slow_and_fast_again() -> None:
    changes = [{"at": "60s", "cost": "update", "times": 0.33}, {"at": "100s", "cost": "update", "times": 1.0}]
    check_phases(scene(changes=changes, versions=160))


def test_a_trainer_that_leases_its_device_to_a_generator_gets_it_back_for_good() -> None:
    """Each switch costs 100 ms for the trainer and 50 ms for the generator, which the forecast knows."""
    resident = {"devices": "1", "resident_gb": 1.0}
    settings = scene(
        generators=[{"serve": "4ms+2ms", "devices": "0"}, {"serve": "4ms+2ms", **resident}],
        trainer={"update": "1000ms", **resident, "resident_gb": 2.0},
        sharing="lease",
        lease={"min_hold": "200ms", "host_gb_per_s": 20.0},
        versions=26,
    )
    settings = moving(settings)
    conductor = build_conductor(settings.scheduler)
    assert isinstance(conductor, MovingConductor)
    cluster = VirtualCluster(settings, conductor, record=True)
    watch = GuaranteeChecker(cluster, conductor.outer)
    cluster.run()
    watch.finish()
    assert [(move.outcome, move.move) for move in conductor.chosen[:2]] == [
        ("begun", "generator-1 off"),
        ("kept", "generator-1 off"),
    ]
    last = cluster.driver.steps[-200:]
    assert not any(isinstance(command, TakeDevice) for step in last for command in step.commands)


def cut(by_passes: float) -> ClusterSettings:
    """A trainer that is the slowest station, with micro-batches of 8 chunk steps, of 2 to 64."""
    trainer = {"update": "1500ms", "micro_batch": 8, "by_passes": by_passes}
    settings = scene(generators=[{"serve": "4ms+2ms", "count": 2}], trainer=trainer, versions=48)
    rules = MoveRules({}, 8, (2, 4, 8, 16, 32, 64))
    return settings.model_copy(update={"scheduler": replace(settings.scheduler, moves=rules)})


def test_micro_batches_become_larger_while_that_is_faster() -> None:
    run = WatchedRun(cut(0.5))
    first, second, third = (move for _, move in run.chosen[:3])
    assert (first.outcome, first.move) == ("begun", "micro_batch_steps 8 → 16")
    assert (second.outcome, second.move) == ("kept", "micro_batch_steps 8 → 16")
    assert second.measured == pytest.approx(1.33, abs=0.03)
    assert third.move.startswith("micro_batch_steps 16 →")


@long(2, "a simulated search")
def test_larger_micro_batches_that_train_longer_are_undone_after_two_updates_and_smaller_ones_tried() -> None:
    run = WatchedRun(cut(-0.5))
    moves = [(move.outcome, move.move) for _, move in run.chosen]
    assert moves[:3] == [
        ("begun", "micro_batch_steps 8 → 16"),
        ("undone", "micro_batch_steps 16 → 8"),
        ("begun", "micro_batch_steps 8 → 2"),
    ]
    assert run.chosen[1][0] - run.chosen[0][0] <= 3
    assert ("kept", "micro_batch_steps 8 → 2") in moves


def leased(**changes: Any) -> ClusterSettings:
    """A generator and the trainer on one device in turn, with dear switches; they may be on it together."""
    beside = {"devices": "0", "resident_gb": 1.0}
    settings = scene(
        generators=[{"serve": "4ms+2ms", **beside}],
        trainer={"update": "800ms", **beside, "resident_gb": 2.0},
        sharing="lease",
        lease={"min_hold": "300ms", "host_gb_per_s": 5.0},
        **changes,
    )
    rules = MoveRules({name: own for name, _, own in settings.seats() if own}, together=True)
    return settings.model_copy(update={"scheduler": replace(settings.scheduler, moves=rules)})


def test_a_lease_becomes_a_share_where_switches_cost_more() -> None:
    run = WatchedRun(leased(versions=24), record=True)
    first, second = (move for _, move in run.chosen[:2])
    assert (first.outcome, first.move) == ("begun", "sharing lease → share")
    assert second.outcome == "kept"
    assert second.measured > 1.8
    assert not any(isinstance(c, TakeDevice) for step in run.cluster.driver.steps[-200:] for c in step.commands)


@long(2, "a simulated search")
def test_a_share_that_is_slower_than_the_lease_is_given_back_once() -> None:
    """Two passes at once each take five times as long, which no forecast knows."""
    run = WatchedRun(leased(versions=48, switching=3.0), record=True)
    shares = [(move.outcome, move.move) for _, move in run.chosen if "sharing" in move.move]
    assert shares == [("begun", "sharing lease → share"), ("undone", "sharing share → lease")]
    last = [c for step in run.cluster.driver.steps[-400:] for c in step.commands if isinstance(c, TakeDevice)]
    assert last
    assert not any(command.beside for command in last)


def lying(true: float) -> MovingConductor:
    """A conductor that believes every other operation to be half as fast again."""
    rules = MoveRules({"generator-0": (0,), "generator-1": (1,), "trainer": (1,)})
    settings = replace(scene().scheduler, moves=rules)
    return judged(settings, lambda one: true if one == Operation((), 2.0) else 1.5 * true)


def test_wrong_forecasts_cost_little_and_are_undone() -> None:
    generators = [{"serve": "12ms+6ms", "devices": "0"}, {"serve": "12ms+6ms", "devices": "1"}]
    settings = scene(generators=generators)
    start, moved = WatchedRun(settings), WatchedRun(settings, conductor=lying(18.5))
    outcomes = [move.outcome for _, move in moved.chosen]
    assert outcomes[:2] == ["begun", "undone"]
    assert not [move for _, move in moved.chosen if move.outcome == "kept" and "generator-1" in move.move]
    assert moved.rate(0, 56) >= 0.97 * start.rate(0, 56)


def test_a_search_waits_while_the_generators_that_are_on_are_lost() -> None:
    """Generator-1 is off when generator-0 is lost for some versions, in which a search would begin."""
    fault = {"station": "generator-0", "at": "20s", "detected": "0.1s", "restart": "20s"}
    run = WatchedRun(moving(scene(versions=34, faults=[fault])))
    assert [move.move for _, move in run.chosen[:2]] == ["generator-1 off", "generator-1 off"]
    assert max(run.published) == 34


def test_a_forecast_without_a_generator_that_is_on_is_one_of_all() -> None:
    settings = moving(scene())
    assert settings.scheduler.moves is not None
    conductor = lying(20.0)
    WatchedRun(scene(versions=9), conductor=conductor)
    times = conductor.mover.timing.measured()
    assert times is not None
    times = replace(times, generators={"generator-1": 1}, version_s=1.4, events=200)
    judge = OperationJudge(settings.scheduler, settings.scheduler.moves)
    assert judge(times, Operation(OFF, 2.0), settings.scheduler.limits).advance(0.1) is None


@pytest.mark.parametrize("forecast", [0.86, 1.0, 1.1])
def test_a_lower_bound_that_loses_is_undone_however_wrong_the_forecast_is(forecast: float) -> None:
    """The true rates are 29.5, 26.1 and 19.8 samples/s at α 2, 1 and 0.5."""
    simulators = [{"env_batches": 4, "slots": 2, "rows": 4, "step": "lognormal:100ms:0.9", "steps": 8}]
    base = scene(generators=[{"serve": "4ms+2ms"}], trainer={"update": "700ms"}, simulators=simulators, versions=46)
    settings = replace(base.scheduler, moves=MoveRules({}))
    conductor = judged(settings, lambda one: 29.5 * forecast * (1.0 if one.max_lag >= 1.0 else 0.8))
    run = WatchedRun(base, conductor=conductor)
    outcomes = [(move.outcome, move.move) for _, move in run.chosen]
    assert ("undone", "max_lag 1 → 2") in outcomes
    assert "kept" not in [outcome for outcome, _ in outcomes]
    assert all(move.measured < 1.0 for _, move in run.chosen)


def in_a_try(now: float = 2.0) -> tuple[MovingConductor, float]:
    """A conductor in the middle of a try whose present version has taken too long; the time."""
    conductor = lying(18.5)
    cluster = VirtualCluster(scene(trainer={"update": "4000ms", "devices": "1"}), conductor)
    cluster.driver.submit(TrainUntil(50))
    cluster.driver.run(50, now)
    mover = conductor.mover
    mover.trial, mover.last, mover.disturbed = MoveTrial(Operation(OFF, 2.0), 60.0, 1.1, fresher=False), 0.0, False
    return conductor, cluster.driver.clock.now


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


def test_a_try_that_an_interruption_ends_is_given_up() -> None:
    conductor, _ = in_a_try()
    conductor.mover.lost_s = 30.0
    conductor.detach()
    mover = conductor.mover
    assert (mover.operation, mover.trial, mover.lost_s) == (Operation(OFF, 2.0), None, 0.0)
    assert mover.skip == mover.catch_up


@pytest.mark.parametrize("lost", [False, True])
def test_an_update_shared_its_device_until_the_pass_ended_or_was_lost(lost: bool) -> None:
    devices = {"generator-0": (0,), "trainer": (0,)}
    timing = RunTiming(SchedulerSettings(8), MoveRules(devices))
    batch = Batch(0, "generator-0", (Request("s0", "simulator-0", 1, 1, 0, "h", 0.0, None, ""),))
    timing.on_commands([Serve("generator-0", batch), StartUpdate("trainer", 0, 0, (), ())], 0.0)
    timing.on_event(StationLost("generator-0", 0, "dies") if lost else BatchDone("generator-0", 0, 0, 0), 10.0)
    timing.on_event(UpdateDone("trainer", 0, 0), 20.0)
    assert timing.updates[0].values == [15.0]


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


def test_a_change_of_steps_that_would_do_nothing_is_refused() -> None:
    changes = [{"at": "1s", "cost": "step", "times": 2.0}]
    with pytest.raises(ValueError, match="episode_time"):
        scene(changes=changes, simulators=[{"episode_time": "1s", "steps": 8}])
    assert scene(changes=changes).changes[0].times == 2.0


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


@pytest.mark.parametrize(
    ("devices", "off", "expected"),
    [
        # alone on its device, or the only one: nothing to switch
        ({"generator-0": (0,), "generator-1": (1,), "trainer": (2,)}, (), []),
        ({"generator-0": (0,), "trainer": (0,)}, (), []),
        ({"generator-0": (0,), "generator-1": (1,), "trainer": (1,)}, (), [("generator-1",)]),
        ({"generator-0": (0,), "generator-1": (1,), "trainer": (1,)}, ("generator-1",), [()]),
        # two equal ones beside the trainer's, never all three
        (
            {"generator-0": (0,), "generator-1": (0,), "trainer": (0,)},
            (),
            [("generator-1",)],
        ),
    ],
)
def test_neighbours_are_those_of_generators_that_share(
    devices: dict[str, tuple[int, ...]], off: tuple[str, ...], expected: list[tuple[str, ...]]
) -> None:
    generators = [name for name in devices if name.startswith("generator")]
    settings = SchedulerSettings(8, max_lag=0.0)
    found = neighbours(Operation(off, 0.0), generators, settings, MoveRules(devices))
    assert [one.off for one in found] == expected


def test_neighbours_in_micro_batches_and_sharing() -> None:
    settings, rules = SchedulerSettings(8, max_lag=0.0), MoveRules({}, 8, (4, 8, 16), together=True)
    here = starting(settings, rules)
    words = [here.describe(one) for one in neighbours(here, ["generator-0"], settings, rules)]
    assert words == ["micro_batch_steps 8 → 4", "micro_batch_steps 8 → 16", "sharing lease → share"]
    largest = Operation((), 0.0, 16, together=True)
    words = [largest.describe(one) for one in neighbours(largest, ["generator-0"], settings, rules)]
    assert words == ["micro_batch_steps 16 → 8", "sharing share → lease"]
    words = [largest.describe(one) for one in neighbours(largest, ["generator-0"], settings, rules, (8, 16))]
    assert words == ["micro_batch_steps 16 → 4", "micro_batch_steps 16 → 8", "sharing share → lease"]


@pytest.mark.parametrize(
    ("measured", "size", "seconds"),
    [
        ({8: 1.0}, 8, 1.0),
        ({8: 1.0}, 16, 1.0 - FIXED / 2),
        ({8: 1.0}, 4, 1.0 + FIXED),
        ({8: 1.0, 16: 0.75}, 32, 0.625),
        ({8: 1.0, 16: 1.25}, 4, 0.5),
        ({8: 1.0, 16: 0.75, 32: 0.8}, 64, 0.825),
    ],
)
def test_updates_with_other_micro_batches_are_on_the_line_of_the_measured(
    measured: dict[int, float], size: int, seconds: float
) -> None:
    times = MeasuredTimes({}, {}, (), {}, 0.0, 0.0, 0.0, measured, 0.0, {}, 8)
    assert times.update_with(size) == pytest.approx(seconds)


def test_a_lower_bound_is_a_neighbour_of_the_users_alone() -> None:
    found = neighbours(Operation((), 2.0), ["generator-0"], SchedulerSettings(8, max_lag=2.0), MoveRules({}))
    assert [one.max_lag for one in found] == [1.0, 0.5]
    assert neighbours(Operation((), 0.0), ["generator-0"], SchedulerSettings(8, max_lag=0.0), MoveRules({})) == []


def test_a_lost_station_spoils_the_measurement_of_its_version() -> None:
    conductor = lying(20.0)
    WatchedRun(scene(versions=4), conductor=conductor)
    conductor.handle(StationLost("simulator-0", 0, "dies"), 100.0)
    assert conductor.mover.disturbed


def test_times_of_a_lost_generator_are_kept() -> None:
    conductor = lying(20.0)
    run = WatchedRun(scene(versions=4), conductor=conductor)
    point, now = conductor.mover.timing.point(), run.cluster.driver.clock.now
    for generator in ("generator-0", "generator-1"):
        conductor.handle(StationLost(generator, 0, "dies"), now)
        assert conductor.mover.timing.point() == point
    conductor.handle(GeneratorJoined("generator-0", 1), now)
    assert conductor.mover.timing.point() == point


def test_a_simulator_for_evaluation_alone_does_not_keep_times_from_being_known() -> None:
    conductor = lying(20.0)
    run = WatchedRun(scene(versions=4), conductor=conductor)
    slots = (SlotInfo("evaluation/0", 0, 1),)
    batches = (EnvBatchInfo("evaluation", slots, reserved=True),)
    conductor.handle(SimulatorJoined("simulator-9", 0, batches), run.cluster.driver.clock.now)
    times = conductor.mover.timing.measured()
    assert times is not None
    assert list(times.simulators) == ["simulator-0"]
    assert times.base_s == pytest.approx(0.004, rel=0.1)
    assert times.per_row_s == pytest.approx(0.002, rel=0.1)
    assert times.update_s == pytest.approx(1.0, rel=0.05)


def test_a_forecast_is_near_what_the_same_cluster_does() -> None:
    """The times that are measured under one operation forecast the other."""
    settings = moving(scene(versions=16))
    assert settings.scheduler.moves is not None
    conductor = lying(20.0)
    WatchedRun(scene(versions=9), conductor=conductor)
    times = conductor.mover.timing.measured()
    assert times is not None
    times = replace(times, version_s=1.4, events=200)
    judge = OperationJudge(settings.scheduler, settings.scheduler.moves)
    for off, rate in (((), 23.9), (OFF, 30.0)):
        simulation = judge(times, Operation(off, 2.0), settings.scheduler.limits)
        while (forecast := simulation.advance(1.0)) is None:
            pass
        assert forecast.samples_per_s == pytest.approx(rate, rel=0.05)
        assert 1.0 < forecast.lag <= 2.0
