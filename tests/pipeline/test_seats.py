"""Seats: every station has one, loads are even, and what is not there is refused with a remedy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.process.runs import config

from polyrhythm.config.sections.placement import PlacementSettings, list_device_ids
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.build import run_seats, station_names
from polyrhythm.pipeline.seats import (
    assign_seats,
    bind_environment,
    divide_devices,
    group_seats,
    list_excess_threads,
    list_unused_devices,
)

NAMES = {"simulators": ["s0", "s1", "s2"], "generators": ["g0", "g1"], "trainer": ["trainer"]}


def placement(**sections: object) -> PlacementSettings:
    return PlacementSettings.model_validate(sections)


@given(
    devices=st.integers(1, 9),
    simulators=st.integers(1, 20),
    generators=st.integers(1, 20),
    trainer=st.booleans(),
    named=st.dictionaries(
        st.sampled_from(["simulators", "generators"]), st.sets(st.integers(0, 8), min_size=1), max_size=2
    ),
    preset=st.sampled_from([None, "colocated", "hybrid", "disaggregated"]),
)
def test_every_station_has_one_seat_and_devices_differ_by_one_station_at_most(
    devices, simulators, generators, trainer, named, preset
):
    asked = {kind: {"devices": sorted({device % devices for device in ids})} for kind, ids in named.items()}
    stations = {
        "simulators": [f"simulator-{index}" for index in range(simulators)],
        "generators": [f"generator-{index}" for index in range(generators)],
        "trainer": ["trainer"] * trainer,
    }
    if preset not in (None, "colocated") and devices == 1:
        preset = "colocated"
    seats = assign_seats(placement(preset=preset, **asked), stations, devices)
    assert list(seats) == [name for names in stations.values() for name in names]
    for kind, names in stations.items():
        given_ids = asked[kind]["devices"] if kind in asked else divide_devices(preset, devices)[kind] if preset else []
        loads = Counter({f"cuda:{device}": 0 for device in given_ids} or {"cpu": 0})
        allowed = set(loads)
        loads.update(seats[name].device for name in names)
        assert set(loads) == allowed
        assert max(loads.values()) - min(loads.values()) <= 1


def test_instance_i_has_the_ith_device_counted_round_and_threads_are_of_the_kind():
    asked = placement(simulators={"devices": "4,0"}, generators={"devices": "all", "threads": 3})
    seats = assign_seats(asked, NAMES, 5)
    assert [seats[name].device for name in NAMES["simulators"]] == ["cuda:4", "cuda:0", "cuda:4"]
    assert group_seats({name: seats[name] for name in ("g0", "g1", "trainer")}) == (
        "g0: cuda:0, 3 threads; g1: cuda:1, 3 threads; trainer: cpu, 1 thread"
    )


def test_all_kinds_without_their_devices_and_an_inline_run_are_named_together():
    asked = placement(simulators={"devices": 0}, generators={"devices": 1})
    with pytest.raises(ConfigError) as caught:
        assign_seats(asked, NAMES, 0, inline=True)
    starts = [problem.partition(":")[0] for problem in caught.value.problems]
    assert starts == [
        "placement.simulators.devices",
        "placement.simulators.devices = 0",
        "placement.generators.devices = 1",
    ]
    with pytest.raises(ConfigError, match="with launcher = inline"):
        assign_seats(placement(preset="colocated"), NAMES, 2, inline=True)
    on_cpu = placement(preset="colocated", simulators={"devices": "cpu"})
    assert assign_seats(on_cpu, NAMES, 2, inline=True)["s0"].device == "cpu"


def test_many_equal_seats_are_the_first_and_the_last():
    stations = {
        "simulators": [f"simulator-{index}" for index in range(120)],
        "generators": ["generator-0", "generator-1", "generator-2"],
        "trainer": ["trainer"],
    }
    every = "simulator-0 to simulator-119, generator-0, generator-1, generator-2, trainer: cpu, 1 thread"
    assert group_seats(assign_seats(placement(), stations, 0)) == every
    two = group_seats(assign_seats(placement(simulators={"devices": "0,1"}), stations, 2))
    assert two.startswith("simulator-0, simulator-2, … simulator-118 (60): cuda:0, 1 thread; simulator-1, simulator-3")


def test_more_threads_than_cores_are_told_for_kinds_that_have_stations():
    asked = placement(trainer={"threads": 9}, generators={"threads": 8}, simulators={"threads": 10})
    stations = NAMES | {"simulators": []}
    assert [sentence.partition(":")[0] for sentence in list_excess_threads(asked, stations, 8)] == [
        "placement.trainer.threads = 9"
    ]
    assert "set it to 1 or less" in list_excess_threads(asked, stations, 1)[0]


@pytest.mark.parametrize(
    ("sections", "devices", "words"),
    [
        ({"generators": {"devices": "4-7"}}, 2, r"placement.generators.devices = 4-7: torch sees 2 .*ids of 0-1$"),
        ({"generators": {"devices": 1}}, 1, r"placement.generators.devices = 1: torch sees 1 .*or ids of 0$"),
        ({"simulators": {"devices": "all"}}, 0, r"placement.simulators.devices = all: torch sees 0 .*use cpu, or"),
        ({"trainer": {"devices": "2,3"}}, 8, r"placement.trainer.devices = 2,3: .*name one, such as 2$"),
        ({"trainer": {"devices": "all"}}, 8, r"placement.trainer.devices = all: .*name one, such as 0$"),
        ({"preset": "hybrid"}, 1, r"placement.preset = hybrid: .*at least 2 .*write placement=colocated, or "),
        ({"preset": "colocated"}, 0, r"placement.preset = colocated: .*at least 1 CUDA device .*write placement=null "),
    ],
)
def test_what_is_not_there_is_refused_with_a_remedy(sections, devices, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        assign_seats(placement(**sections), NAMES, devices)


def test_a_kind_that_names_devices_is_not_placed_by_the_preset():
    cpu = {kind: {"devices": "cpu"} for kind in NAMES}
    assert {seat.device for seat in assign_seats(placement(preset="hybrid", **cpu), NAMES, 0).values()} == {"cpu"}


def test_the_presets_on_eight_devices_are_those_of_the_paper():
    every = tuple(range(8))
    assert divide_devices("colocated", 8) == {"simulators": every, "generators": every, "trainer": (0,)}
    assert divide_devices("hybrid", 8) == {"simulators": every[:6], "generators": every[6:], "trainer": (0,)}
    parts = divide_devices("disaggregated", 8)
    assert parts["simulators"] == parts["generators"]
    assert not set(parts["trainer"]) & set(parts["generators"])


@pytest.mark.parametrize(
    ("outer", "bound"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1", "MUJOCO_EGL_DEVICE_ID": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "5, 6"}, {"CUDA_VISIBLE_DEVICES": "6", "MUJOCO_EGL_DEVICE_ID": "6"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, {"CUDA_VISIBLE_DEVICES": "GPU-b"}),
        ({"MUJOCO_EGL_DEVICE_ID": "3"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    ],
)
def test_a_simulators_process_is_bound_to_the_device_that_torch_counts_as_its_number(outer, bound):
    assert bind_environment(1, outer) == bound


def test_only_simulators_are_bound_by_variables():
    seats = assign_seats(placement(preset="colocated"), NAMES, 2)
    assert {name for name, seat in seats.items() if seat.environment} == set(NAMES["simulators"])


def test_more_devices_than_stations_are_told():
    (sentence,) = list_unused_devices(placement(generators={"devices": "0-3"}, simulators={"devices": "0-2"}), NAMES)
    assert sentence.startswith("placement.generators.devices = 0-3: 2, 3 stay unused, because there are fewer")
    assert sentence.endswith("raise rollout.generators to 4, or name fewer devices")


def test_stations_for_evaluation_have_seats_and_names_are_those_of_the_run():
    settings = config(evaluation={"every": 1, "every_episodes": 2, "weights": "own_generator"})
    names = station_names(settings)
    assert (names["simulators"][-1], names["generators"][-1]) == ("simulator-evaluation", "generator-evaluation")
    assert list(run_seats(settings)) == [name for kind in names.values() for name in kind]
    assert "trainer" not in run_seats(settings, trainer=False)


def test_ranges_and_ids_are_listed_in_their_order():
    assert list_device_ids("6,0-2") == (6, 0, 1, 2)
