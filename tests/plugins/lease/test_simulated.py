"""Stations that hold their devices in turn: times worked out by hand, and every guarantee on random placements."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached
from tests.plugins.virtual.clustersim.clusters import run, settings, times

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.lease.conductor import LeasedConductor
from polyrhythm.plugins.lease.lease import DeviceLeases
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.driver import Deadlock
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings, LeaseCosts
from polyrhythm.plugins.virtual.clustersim.station import LeaseError
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.records import Command, DeviceTaken, DeviceYielded, Event, TakeDevice, UpdateDone, YieldDevice

near = pytest.approx


def leased(rng: random.Random, base: ClusterSettings) -> ClusterSettings:
    """The cluster on few devices: several stations on each, and the trainer on several of them."""
    every = tuple(range(rng.randint(1, 3)))

    def placed(group: Any) -> Any:
        own = rng.choice(((), every, tuple(rng.sample(every, rng.randint(1, len(every))))))
        return group.model_copy(update={"devices": own, "resident_gb": rng.choice((0.0, 0.1, 1.0))})

    rules = {
        "min_hold": rng.choice((0.0, 0.01, 0.2)),
        "switch_order": rng.choice(("data_flow", "arrival")),
        "devices": rng.choice(((), (), every, (rng.choice(every),))),
        "host_gb_per_s": 20.0,
    }
    found = base.model_copy(
        update={
            "sharing": "lease",
            "lease": LeaseCosts.model_validate(rules),
            "simulators": tuple(map(placed, base.simulators)),
            "generators": tuple(map(placed, base.generators)),
            "trainer": placed(base.trainer).model_copy(update={"gradient_steps": rng.choice((1, 3))}),
        }
    )
    return found.model_copy(update={"scheduler": replace(base.scheduler, parts=False, lease=found.lease_rules())})


PLACE = {"devices": "0"}
#: A trainer of 2 GB and a generator of 1 GB: 100 ms and 50 ms for each switch.
LEASED: dict[str, Any] = {
    "generators": {**PLACE, "resident_gb": 1.0},
    "trainer": {**PLACE, "resident_gb": 2.0},
    "sharing": "lease",
    "lease": {"host_gb_per_s": 20.0},
}


def test_in_lock_step_generator_and_trainer_take_turns() -> None:
    cluster, summary = run(settings(**LEASED, versions=1))
    # take 100, publish 30, give back 100, take 50, apply 20, reset 50, three times (serve 6, step 10), give back 50,
    # take 100, update 100
    assert times(cluster, UpdateDone) == near([0.130 + 0.100 + 0.050 + 0.020 + 0.098 + 0.050 + 0.100 + 0.100])
    # publish 30, give back 100, take 50, apply 20
    assert summary["virtual_s"] == near(0.648 + 0.030 + 0.100 + 0.050 + 0.020)
    assert [type(step.event) for step in cluster.driver.steps if type(step.event) in (DeviceTaken, DeviceYielded)] == [
        *(DeviceTaken, DeviceYielded) * 3,
        DeviceTaken,
    ]
    assert summary["switches"] == {"count": 7, "s": near(4 * 0.100 + 3 * 0.050), "bytes": 11_000_000_000}


def test_the_trace_shows_every_switch() -> None:
    cluster_settings = settings(**LEASED, versions=1)
    cluster = VirtualCluster(cluster_settings)
    spans: list[tuple[str, str, float, float]] = []
    cluster.driver.measures.span = lambda *span: spans.append(span)
    cluster.run()
    switches = [(track, name, end - begin) for track, name, begin, end in spans if "device" in name]
    assert switches[:3] == [
        ("trainer", "take device 0", near(0.100)),
        ("trainer", "yield device 0", near(0.100)),
        ("generator-0", "take device 0", near(0.050)),
    ]
    assert len(switches) == 7


def test_a_station_alone_on_its_devices_leases_none_of_them() -> None:
    own = settings(generators={"devices": "0"}, trainer={"devices": "0-1"}, sharing="lease")
    assert own.scheduler.lease is not None
    assert own.scheduler.lease.devices == {"generator-0": (0,), "trainer": (0,)}
    apart = settings(generators={"devices": "0"}, trainer={"devices": "1"}, sharing="lease")
    assert apart.scheduler.lease is not None
    assert apart.scheduler.lease.devices == {}


def test_on_devices_that_are_not_named_passes_slow_each_other_down() -> None:
    both = {"generators": {"devices": "0", "count": 2}, "trainer": {"devices": "0-1"}, "sharing": "lease"}
    some = settings(**both, lease={"devices": "1"})
    assert some.scheduler.lease is not None
    assert some.scheduler.lease.devices == {}, "the trainer is alone on device 1"
    both["generators"] = {"devices": "0-1", "count": 2}
    some = settings(**both, lease={"devices": "1"})
    assert some.scheduler.lease is not None
    assert some.scheduler.lease.devices == {"generator-1": (1,), "trainer": (1,)}
    with pytest.raises(ValueError, match="batching is streams but generator-0 shares devices"):
        settings(**both, lease={"devices": "1"}, scheduler={"batching": "streams"})


def test_leases_in_the_scheduler_section_are_refused() -> None:
    with pytest.raises(ValueError, match="follows from the devices of the groups; set sharing to lease"):
        settings(scheduler={"lease": {"devices": {"trainer": [0]}}})


@pytest.mark.parametrize("who", ["generator-0", "trainer"])
@pytest.mark.parametrize("at", [0.05, 0.11, 0.16, 0.26, 0.29, 0.35, 0.42, 0.5, 0.6, 0.66, 0.7])
def test_who_dies_at_any_moment_of_a_turn_or_a_switch_comes_back_and_the_run_goes_on(who: str, at: float) -> None:
    fault = {"station": who, "at": f"{at:g}s", "detected": "40ms", "restart": "60ms"}
    cluster, summary = run(settings(**LEASED, versions=2, faults=[fault]))
    assert cluster.driver.reached == 2
    assert summary["stations_lost"] == 1


class Forgetful(DeviceLeases):
    """Keeps the devices of a station that is lost."""

    def leave(self, name: str) -> None:
        self.present.pop(name, None)
        self.waiting.pop(name, None)


def test_leases_that_outlive_their_holder_end_in_deadlock() -> None:
    fault = {"station": "trainer", "at": "110ms", "detected": "40ms", "restart": "60ms"}
    cluster_settings = settings(**LEASED, versions=2, faults=[fault])
    conductor = build_conductor(cluster_settings.scheduler)
    assert isinstance(conductor, LeasedConductor)
    conductor.delivery.leases = Forgetful(conductor.delivery.rules)
    with pytest.raises((Deadlock, KeyError)):
        VirtualCluster(cluster_settings, conductor).run()


def test_work_for_a_station_off_its_device_is_seen() -> None:
    class Hurried(LeasedConductor):
        def handle(self, event: Event, now: float) -> list[Command]:
            commands = super().handle(event, now)
            for waiting in self.delivery.held_back.values():
                commands += waiting
                waiting.clear()
            return commands

    cluster_settings = settings(**LEASED, versions=1)
    with pytest.raises(LeaseError, match="trainer works, but is not on all of its devices"):
        VirtualCluster(cluster_settings, Hurried(Conductor(cluster_settings.scheduler))).run()


def test_who_is_beside_others_is_alone_once_stations_take_turns_again() -> None:
    cluster = VirtualCluster(settings(**{**LEASED, "generators": {**LEASED["generators"], "count": 2}}, versions=1))
    first, second, trainer = (cluster.stations[name] for name in ("generator-0", "generator-1", "trainer"))
    first.switch(TakeDevice(first.name, 0))
    with pytest.raises(LeaseError, match="generator-0 is there"):
        trainer.switch(TakeDevice(trainer.name, 0))
    second.switch(TakeDevice(second.name, 0, beside=True))
    for one in (first, second):
        one.leases[0].on, one.leases[0].switching = True, False
    first.switch(YieldDevice(first.name, 0))
    first._switched((YieldDevice(first.name, 0), 0.0))
    with pytest.raises(LeaseError, match="generator-1 is there"):
        trainer.switch(TakeDevice(trainer.name, 0))
    trainer.switch(TakeDevice(trainer.name, 0, beside=True))


@examples(max_examples=tries(20, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_random_placements_reach_their_target_with_every_guarantee(rng: random.Random) -> None:
    cluster_settings = leased(rng, arbitrary_cluster(rng, redundant=rng.random() < 0.2))
    conductor = build_conductor(cluster_settings.scheduler)
    cluster = VirtualCluster(cluster_settings, conductor)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))
