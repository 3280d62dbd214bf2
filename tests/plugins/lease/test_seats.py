"""Which stations are on their device in turn."""

from __future__ import annotations

import pytest
from tests.process.runs import config

from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import SharedSeats, group_seats, place
from polyrhythm.plugins.lease.seats import HOST, share_seats
from polyrhythm.runtime.factories import Resources

LEASE = PlacementSettings.model_validate({"sharing": "lease", "lease": {"min_hold_s": 3.0, "switch_order": "arrival"}})


def seats(**devices: str) -> dict[str, Resources]:
    return {name.replace("_", "-"): Resources(device) for name, device in devices.items()}


def shared(
    rules: PlacementSettings, seats: dict[str, Resources], *, simulators_leave: bool = False, offload: str = ""
) -> SharedSeats:
    return share_seats(rules, seats, simulators_leave=simulators_leave, offload=offload)


def leases(seats: dict[str, Resources], *, simulators_leave: bool = False) -> dict[str, tuple[int, ...]]:
    found = shared(LEASE, seats, simulators_leave=simulators_leave).seats
    assert {name: seat.device for name, seat in found.items()} == {name: seat.device for name, seat in seats.items()}
    return {name: seat.leases for name, seat in found.items() if seat.leases}


def test_a_device_is_leased_where_two_stations_on_it_can_leave_it() -> None:
    hybrid = seats(simulator_0="cuda:0", generator_0="cuda:0", generator_1="cuda:1", trainer="cuda:0")
    assert leases(hybrid) == {"generator-0": (0,), "trainer": (0,)}
    assert leases(hybrid, simulators_leave=True) == {"simulator-0": (0,), "generator-0": (0,), "trainer": (0,)}
    apart = seats(simulator_0="cuda:0", generator_0="cuda:0", trainer="cuda:1")
    assert leases(apart) == {}
    assert leases(apart, simulators_leave=True) == {"simulator-0": (0,), "generator-0": (0,)}


def test_the_host_is_one_device() -> None:
    on_cpu = seats(simulator_0="cpu", generator_0="cpu", generator_evaluation="cpu", trainer="cpu")
    assert leases(on_cpu) == dict.fromkeys(("generator-0", "generator-evaluation", "trainer"), (HOST,))


def test_a_trainer_of_several_ranks_leases_the_devices_of_all_of_them_that_others_are_on() -> None:
    ranks = {"trainer": "cuda:0", "trainer-rank1": "cuda:1", "trainer-rank2": "cuda:2"}
    devices = {"generator-0": "cuda:0", "generator-1": "cuda:1", **ranks}
    found = {name: Resources(device) for name, device in devices.items()}
    assert leases(found) == {"generator-0": (0,), "generator-1": (1,), **dict.fromkeys(ranks, (0, 1))}
    rules = shared(LEASE, found).lease
    assert rules is not None
    assert rules.devices == {"generator-0": (0,), "generator-1": (1,), "trainer": (0, 1)}
    alone = {"generator-0": Resources("cuda:1"), "trainer": Resources("cuda:0"), "trainer-rank1": Resources("cuda:0")}
    assert leases(alone) == {}


def test_the_devices_that_are_leased_may_be_named_and_the_others_are_shared() -> None:
    def leases_on(devices: str | None, found: dict[str, Resources]) -> dict[str, tuple[int, ...]]:
        rules = PlacementSettings.model_validate({"sharing": "lease", "lease": {"devices": devices}})
        taken = shared(rules, found).seats
        return {name: seat.leases for name, seat in taken.items() if seat.leases}

    ranks = {"trainer": "cuda:0", "trainer-rank1": "cuda:1"}
    found = {
        name: Resources(device) for name, device in {"generator-0": "cuda:0", "generator-1": "cuda:1", **ranks}.items()
    }
    everywhere = {"generator-0": (0,), "generator-1": (1,), **dict.fromkeys(ranks, (0, 1))}
    assert leases_on(None, found) == leases_on("all", found) == leases_on("0-1", found) == everywhere
    assert leases_on("1", found) == {"generator-1": (1,), **dict.fromkeys(ranks, (1,))}
    assert leases_on("7", found) == {}
    assert leases_on("0", seats(generator_0="cpu", trainer="cpu")) == {}, "the host is no device with a number"


def test_a_device_that_is_named_for_leases_and_has_nobody_to_take_turns_is_told() -> None:
    rules = PlacementSettings.model_validate({"sharing": "lease", "lease": {"devices": "0-2"}})
    found = seats(generator_0="cuda:0", generator_1="cuda:1", trainer="cuda:0")
    (told,) = shared(rules, found).warnings
    assert told.startswith("placement.lease.devices = 0-2: nobody takes turns on 1, 2, as fewer than two stations")
    assert shared(LEASE, found).warnings == []


def test_simulators_that_join_are_on_no_device_of_ours() -> None:
    env = {"type": "tests.process.settings:LeavingSettings", "id": "CartPole-v1", "max_steps": 40}
    placed = place(config(env=env, join={"simulators": 1}, placement={"sharing": "lease"}))
    assert placed.seats["simulator-0"].leases == (HOST,)
    assert placed.seats["simulator-joined-0"] == Resources("cpu", 1)
    assert placed.lease is not None
    assert "simulator-joined-0" not in placed.lease.devices
    assert not placed.ends.pairs, "no process group stays on a device that is left"


def test_by_default_nothing_is_leased() -> None:
    placed = place(config())
    assert all(seat.leases == () for seat in placed.seats.values())
    assert placed.ends.pairs
    assert placed.lease is None


def test_the_conductor_is_told_the_leases_and_their_rules() -> None:
    found = shared(LEASE, seats(generator_0="cuda:2", trainer="cuda:2"), offload="run")
    rules = found.lease
    assert rules is not None
    assert (rules.devices, rules.min_hold_s, rules.switch_order) == (
        {"generator-0": (2,), "trainer": (2,)},
        3.0,
        "arrival",
    )
    assert {seat.offload for seat in found.seats.values()} == {"run"}


def test_the_seats_of_a_run_say_who_takes_turns() -> None:
    settings = config(rollout={"generators": 1}, placement={"sharing": "lease"})
    assert group_seats(place(settings).seats).endswith("generator-0, trainer: cpu, 1 thread, in turn")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"sharing": "lend"}, "sharing"),
        ({"sharing": "lease", "lease": {"min_hold_s": -1.0}}, "min_hold_s"),
        ({"lease": {"switch_order": "random"}}, "switch_order"),
        ({"lease": {"devices": "cpu"}}, r"placement.lease.devices = 'cpu': the host is leased where no station has a"),
        ({"lease": {"devices": "3-1"}}, "a range goes down"),
    ],
)
def test_wrong_rules_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(placement=wrong)
