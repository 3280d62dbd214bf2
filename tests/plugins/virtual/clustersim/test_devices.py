"""Passes that share devices, and trainers of several ranks: times worked out by hand."""

import random
from typing import Any

import pytest
from tests.oracles.arbitrary import arbitrary_cluster
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.plugins.virtual.clustersim.hardware import Device, VirtualClock
from polyrhythm.scheduler.records import SampleFinished, UpdateDone, WeightsApplied

near = pytest.approx


def ends(*passes: tuple[float, float, float], exclusive: bool = False, **costs: float) -> list[float]:
    """When passes of (begin, seconds, occupies) on one device end."""
    clock = VirtualClock()
    device = Device(clock, exclusive=exclusive, **costs)
    found = [0.0] * len(passes)

    def begin(index: int) -> None:
        _, seconds, occupies = passes[index]
        device.begin(index, seconds, occupies, end, index)

    def end(index: int) -> None:
        found[index] = clock.now

    for index, (at, _, _) in enumerate(passes):
        clock.at(at, begin, index)
    while clock.upcoming < float("inf"):
        clock.advance()
    return found


def test_passes_that_fit_together_do_not_slow_each_other() -> None:
    assert ends((0, 3, 0.7), (1, 1, 0.3)) == near([3, 2])


def test_passes_that_do_not_fit_are_slowed_alike() -> None:
    assert ends((0, 3, 0.7), (1, 1, 0.8)) == near([3.5, 2.5])


@pytest.mark.parametrize(("count", "end"), [(1, 1.0), (2, 2.09), (3, 3.18)])
def test_switching_costs_with_each_further_pass(count: int, end: float) -> None:
    passes = [(0.0, 1.0, 1.0)] * count
    assert ends(*passes, switching=0.09) == near([end] * count)
    assert ends(*passes) == near([float(count)] * count)


def test_switching_costs_nothing_where_passes_fit_all_the_same() -> None:
    assert ends((0, 1, 0.4), (0, 1, 0.4), switching=0.09) == near([1, 1])


@pytest.mark.parametrize(("contention", "end"), [(0.5, 2.0), (1.0, 4.0), (1.4, 4**1.4)])
def test_contention_slows_passes_by_their_number(contention: float, end: float) -> None:
    assert ends(*[(0.0, 1.0, 0.1)] * 4, contention=contention) == near([end] * 4)
    assert ends((0, 1, 0.1), contention=contention) == near([1])


def test_a_lease_lets_them_take_turns() -> None:
    assert ends((0, 3, 0.1), (1, 1, 0.1), (1.5, 1, 0.1), exclusive=True) == near([3, 4, 5])


def test_passes_that_end_together_both_end() -> None:
    assert ends((0, 1, 1.0), (0, 1, 1.0)) == near([2, 2])


def test_no_device_does_more_than_one_second_of_work_a_second() -> None:
    rng = random.Random(1)
    passes = [(rng.uniform(0, 20), rng.expovariate(1.0), rng.choice((0.2, 0.7, 1.0))) for _ in range(60)]
    work = sum(seconds * occupies for _, seconds, occupies in passes)
    assert max(ends(*passes)) >= work
    assert all(end >= at + seconds - 1e-9 for end, (at, seconds, _) in zip(ends(*passes), passes, strict=True))


def test_a_pass_of_a_dead_owner_leaves_the_device_to_the_others() -> None:
    clock = VirtualClock()
    device = Device(clock)
    heard: list[tuple[str, float]] = []

    def note(name: str) -> None:
        heard.append((name, clock.now))

    device.begin("one", 2.0, 1.0, note, "one")
    device.begin("two", 2.0, 1.0, note, "two")
    clock.at(1.0, device.forget, "one")
    while clock.upcoming < float("inf"):
        clock.advance()
    assert heard == [("two", near(2.5))]
    assert device.busy == near(2.5)


# The base cluster: publish 30, apply 20, reset 50, then three times (serve 6, step 10): 148; update 100: 248.


def test_colocated_in_lock_step_nothing_overlaps_so_nothing_is_slowed() -> None:
    place = {"devices": "0"}
    cluster, summary = run(settings(simulators=place, generators=place, trainer=place))
    assert times(cluster, UpdateDone) == near([0.248, 0.496])
    assert summary["devices"] == {"0": near(2 * (0.050 + 3 * 0.016 + 0.100) / 0.546)}
    assert summary["gpus"] == 1


def test_a_rollout_beside_an_update_on_its_device_is_slowed_by_it() -> None:
    lag = {"max_lag": 1.0, "on_update": "continue"}
    place = {"devices": "0"}
    cluster, _ = run(settings(scheduler=lag, simulators=place, generators=place, trainer=place))
    # From 148 on the update (100) and the second rollout (98) halve each other's speed: 196 later the latter is done,
    # at 344, and the update has 2 left.
    assert times(cluster, SampleFinished) == near([0.148, 0.344])
    assert times(cluster, UpdateDone) == near([0.346, 0.446])


def test_a_simulator_that_occupies_little_is_not() -> None:
    lag = {"max_lag": 1.0, "on_update": "continue"}
    place = {"devices": "0", "occupies": 0.5}
    cluster, _ = run(settings(scheduler=lag, simulators=place, generators=place, trainer=place))
    assert times(cluster, SampleFinished) == near([0.148, 0.246])


def test_steps_at_once_contend_in_their_simulators_process() -> None:
    """The steps of two env batches take 10 ms together without contention, and 20 ms where they gain nothing."""

    def first_update(contention: float) -> float:
        scheduler, simulators = {"batch_size": 2, "batching": "lockstep"}, {"env_batches": 2, "contention": contention}
        return times(run(settings(scheduler=scheduler, simulators=simulators))[0], UpdateDone)[0]

    assert first_update(1.0) - first_update(0.0) == near(3 * 0.010)


def test_leases_hold_a_pass_until_the_update_is_over() -> None:
    lag = {"max_lag": 1.0, "on_update": "continue"}
    place = {"devices": "0"}
    cluster, _ = run(settings(scheduler=lag, simulators=place, generators=place, trainer=place, sharing="exclusive"))
    # the reset of the second rollout begins as the first sample ends, before the update gets its turn
    assert times(cluster, UpdateDone)[0] == near(0.148 + 0.100 + 0.050)


def test_ranks_share_an_update_and_exchange_gradients_after_each_step() -> None:
    trainer = {"update": "40ms+60ms", "ranks": 3, "gradient_steps": 4, "synchronise": "1ms+2ms"}
    cluster, _ = run(settings(trainer=trainer, versions=1))
    # three transitions on three ranks: 40 + 60, and four times 1 + 3 · 2
    assert times(cluster, UpdateDone) == near([0.148 + 0.100 + 0.028])


def test_ranks_on_devices_wait_for_the_slowest_of_them() -> None:
    lag = {"max_lag": 1.0, "on_update": "continue"}
    trainer = {"update": "100ms", "devices": "0-1", "gradient_steps": 2, "synchronise": "1ms"}
    cluster, summary = run(settings(scheduler=lag, simulators={"devices": "0"}, trainer=trainer))
    # At 148 both begin a step of 50, beside a reset of 50 on device 0: that rank needs 100, and so does the step.
    # Beside the second, from 249 on, the simulator makes three steps of 10, which the rank is late by.
    assert times(cluster, UpdateDone)[0] == near(0.148 + 0.100 + 0.001 + 0.050 + 0.030 + 0.001)
    assert summary["gpus"] == 2
    assert summary["time"]["trainer"]["synchronising"]["s"] == near(2 * 2 * 0.001)


def test_publication_grows_with_the_generators() -> None:
    cluster, summary = run(settings(generators={"count": 3}, trainer={"publish": "30ms+10ms"}, versions=1))
    assert summary["publishing_s"] == near(2 * 0.060)
    assert times(cluster, WeightsApplied)[:3] == near([0.080] * 3)


def test_station_i_is_on_device_i_counted_round() -> None:
    cluster, summary = run(settings(simulators={"count": 3, "devices": "4-5"}, generators={"devices": [7]}))
    assert [cluster.members[f"simulator-{i}"].devices for i in range(3)] == [(4,), (5,), (4,)]
    assert summary["gpus"] == 3


@pytest.mark.parametrize(
    ("part", "wrong", "words"),
    [
        ("trainer", {"devices": "0-7", "ranks": 4}, "ranks is 4 but devices are 8, a rank on each; drop ranks"),
        ("generators", {"devices": "0-1", "gpus": 2}, "gpus is 2 but devices are given, which are counted; leave gpus"),
        ("generators", {"devices": "zero"}, "devices 'zero' are neither a list of numbers nor ranges; write 0-5"),
        ("generators", {"devices": [1, 1]}, r"devices \[1, 1\] are not different whole numbers"),
        ("generators", {"devices": "3-1"}, "devices '3-1' go down; write the smaller number first"),
        ("simulators", {"devices": "0", "occupies": 0.0}, "occupies"),
    ],
)
def test_a_wrong_placement_is_refused(part: str, wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**{part: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(12))
def test_every_guarantee_holds_where_everything_shares_devices_and_fails(seed: int) -> None:
    drawn = random.Random(seed)
    base = arbitrary_cluster(drawn)

    def placed(group: Any) -> Any:
        return group.model_copy(update={"devices": drawn.choice(((0,), (0, 1))), "occupies": drawn.choice((0.3, 1.0))})

    shared = base.model_copy(
        update={
            "sharing": drawn.choice(("shared", "exclusive")),
            "simulators": tuple(map(placed, base.simulators)),
            "generators": tuple(map(placed, base.generators)),
            "trainer": placed(base.trainer).model_copy(update={"gradient_steps": drawn.choice((1, 3))}),
        }
    )
    cluster, summary = run(shared)
    assert cluster.driver.reached == shared.versions or cluster.driver.clock.now == shared.max_time
    assert all(0 <= share < 1 + 1e-9 for share in summary["devices"].values())
