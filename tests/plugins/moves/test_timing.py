"""What forecasts rest on: neighbours of an operation, measured times, and the simulated cluster driven by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.plugins.moves.scenes import OFF, WatchedRun, lying, moving, scene

from polyrhythm.plugins.moves.judge import OperationJudge
from polyrhythm.plugins.moves.operation import Operation, neighbours, starting
from polyrhythm.plugins.moves.timing import FIXED, MeasuredTimes, RunTiming
from polyrhythm.scheduler.records import (
    Batch,
    BatchDone,
    EnvBatchInfo,
    GeneratorJoined,
    Request,
    Serve,
    SimulatorJoined,
    SlotInfo,
    StartUpdate,
    StationLost,
    UpdateDone,
)
from polyrhythm.scheduler.settings import MoveRules, SchedulerSettings


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


def test_a_lower_bound_is_a_neighbour_of_the_users_alone() -> None:
    found = neighbours(Operation((), 2.0), ["generator-0"], SchedulerSettings(8, max_lag=2.0), MoveRules({}))
    assert [one.max_lag for one in found] == [1.0, 0.5]
    assert neighbours(Operation((), 0.0), ["generator-0"], SchedulerSettings(8, max_lag=0.0), MoveRules({})) == []


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


@pytest.mark.parametrize("lost", [False, True])
def test_an_update_shared_its_device_until_the_pass_ended_or_was_lost(lost: bool) -> None:
    devices = {"generator-0": (0,), "trainer": (0,)}
    timing = RunTiming(SchedulerSettings(8), MoveRules(devices))
    batch = Batch(0, "generator-0", (Request("s0", "simulator-0", 1, 1, 0, "h", 0.0, None, ""),))
    timing.on_commands([Serve("generator-0", batch), StartUpdate("trainer", 0, 0, (), ())], 0.0)
    timing.on_event(StationLost("generator-0", 0, "dies") if lost else BatchDone("generator-0", 0, 0, 0), 10.0)
    timing.on_event(UpdateDone("trainer", 0, 0), 20.0)
    assert timing.updates[0].values == [15.0]


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


def test_a_change_of_steps_that_would_do_nothing_is_refused() -> None:
    changes = [{"at": "1s", "cost": "step", "times": 2.0}]
    with pytest.raises(ValueError, match="episode_time"):
        scene(changes=changes, simulators=[{"episode_time": "1s", "steps": 8}])
    assert scene(changes=changes).changes[0].times == 2.0
