"""Seats: every station has one, loads are even, and what is not there is refused with a remedy."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pipeline.runs import LOCKSTEP
from tests.process.runs import config

from polyrhythm.config.load import load_config, merge, validate
from polyrhythm.config.sections.placement import PlacementSettings, list_device_ids
from polyrhythm.errors import ConfigError, MissingError
from polyrhythm.pipeline.array_specs import bucket_sizes, env_batch_infos
from polyrhythm.pipeline.build import env_settings
from polyrhythm.pipeline.placed import (
    assign_seats,
    bind_environment,
    count_ranks,
    divide_devices,
    find_ends,
    group_seats,
    list_excess_threads,
    list_unused_devices,
    place,
    station_names,
)
from polyrhythm.plugins.ranks import check_ranks
from polyrhythm.runtime.devices import SIMULATED, Devices, devices_here
from polyrhythm.runtime.memory.published import Ends

NAMES = {"simulators": ["s0", "s1", "s2"], "generators": ["g0", "g1"], "trainer": ["trainer"]}


def placement(**sections: object) -> PlacementSettings:
    return PlacementSettings.model_validate(sections)


@given(
    devices=st.integers(1, 9),
    simulators=st.integers(1, 20),
    generators=st.integers(1, 20),
    ranks=st.integers(0, 9),
    named=st.dictionaries(
        st.sampled_from(["simulators", "generators", "trainer"]), st.sets(st.integers(0, 8), min_size=1), max_size=2
    ),
    preset=st.sampled_from([None, "colocated", "hybrid", "disaggregated"]),
)
def test_every_station_has_one_seat_and_devices_differ_by_one_station_at_most(
    devices, simulators, generators, ranks, named, preset
):
    asked = {kind: {"devices": sorted({device % devices for device in ids})} for kind, ids in named.items()}
    stations = {
        "simulators": [f"simulator-{index}" for index in range(simulators)],
        "generators": [f"generator-{index}" for index in range(generators)],
        "trainer": [f"trainer-rank{index}" for index in range(ranks)],
    }
    if preset not in (None, "colocated") and devices == 1:
        preset = "colocated"
    seats = assign_seats(placement(preset=preset, **asked), stations, devices_here(devices))
    assert list(seats) == [name for names in stations.values() for name in names]
    for kind, names in stations.items():
        given_ids = (
            asked[kind]["devices"]
            if kind in asked
            else divide_devices(preset, devices_here(devices))[kind]
            if preset
            else []
        )
        loads = Counter({f"cuda:{device}": 0 for device in given_ids} or {"cpu": 0})
        allowed = set(loads)
        loads.update(seats[name].device for name in names)
        assert set(loads) == allowed
        assert max(loads.values()) - min(loads.values()) <= 1


@pytest.mark.parametrize(
    ("sections", "ranks", "expected"),
    [
        ({}, 1, Ends("cpu", ("cpu", "cpu"))),
        ({"trainer": {"devices": "3"}, "generators": {"devices": "0,3"}}, 1, Ends("cuda:3", ("cuda:0", "cuda:3"))),
        ({"trainer": {"devices": "1-2"}, "generators": {"devices": "0"}}, 2, Ends("cuda:1", ("cuda:0", "cuda:0"))),
        ({"trainer": {"devices": "1", "strategy": "shard"}}, 1, Ends("cuda:1", ("cpu", "cpu"))),
        ({"generators": {"devices": "1"}}, 0, Ends("cpu", ("cuda:1", "cuda:1"))),
    ],
)
def test_weights_are_published_where_the_first_rank_is_and_used_where_generators_are(sections, ranks, expected):
    names = {**NAMES, "trainer": [f"trainer-{rank}" for rank in range(ranks)]}
    asked = placement(**sections)
    assert find_ends(asked, names, assign_seats(asked, names, devices_here(4))) == expected


def test_several_ranks_that_shard_keep_no_whole_version_on_a_device():
    names = {**NAMES, "trainer": ["trainer-0", "trainer-1"]}
    asked = placement(trainer={"devices": "0-1", "strategy": "shard"}, generators={"devices": "0-1"})
    ends = find_ends(asked, names, assign_seats(asked, names, devices_here(4)))
    assert (ends.trainer, ends.generators) == ("cuda:0", ("cuda:0", "cuda:1"))
    assert "sharded" in ends.host_only


def test_instance_i_has_the_ith_device_counted_round_and_threads_are_of_the_kind():
    asked = placement(simulators={"devices": "4,0"}, generators={"devices": "all", "threads": 3})
    seats = assign_seats(asked, NAMES, devices_here(5))
    assert [seats[name].device for name in NAMES["simulators"]] == ["cuda:4", "cuda:0", "cuda:4"]
    assert group_seats({name: seats[name] for name in ("g0", "g1", "trainer")}) == (
        "g0: cuda:0, 3 threads; g1: cuda:1, 3 threads; trainer: cpu, 1 thread"
    )


def test_all_kinds_without_their_devices_and_an_inline_run_are_named_together():
    asked = placement(simulators={"devices": 0}, generators={"devices": 1})
    with pytest.raises(ConfigError) as caught:
        assign_seats(asked, NAMES, devices_here(0), inline=True)
    starts = [problem.partition(":")[0] for problem in caught.value.problems]
    assert starts == [
        "placement.simulators.devices",
        "placement.simulators.devices = 0",
        "placement.generators.devices = 1",
    ]
    with pytest.raises(ConfigError, match="with launcher = inline"):
        assign_seats(placement(preset="colocated"), NAMES, devices_here(2), inline=True)
    on_cpu = placement(preset="colocated", simulators={"devices": "cpu"})
    assert assign_seats(on_cpu, NAMES, devices_here(2), inline=True)["s0"].device == "cpu"


def test_many_equal_seats_are_the_first_and_the_last():
    stations = {
        "simulators": [f"simulator-{index}" for index in range(120)],
        "generators": ["generator-0", "generator-1", "generator-2"],
        "trainer": ["trainer"],
    }
    every = "simulator-0 to simulator-119, generator-0, generator-1, generator-2, trainer: cpu, 1 thread"
    assert group_seats(assign_seats(placement(), stations, devices_here(0))) == every
    two = group_seats(assign_seats(placement(simulators={"devices": "0,1"}), stations, devices_here(2)))
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
        ({"trainer": {"devices": "2,3"}}, 3, r"placement.trainer.devices = 2,3: torch sees 3 .*ids of 0-2$"),
        ({"preset": "hybrid"}, 1, r"placement.preset = hybrid: .*at least 2 .*write placement=colocated, or "),
        ({"preset": "colocated"}, 0, r"placement.preset = colocated: .*at least 1 CUDA device .*write placement=null "),
    ],
)
def test_what_is_not_there_is_refused_with_a_remedy(sections, devices, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        assign_seats(placement(**sections), NAMES, devices_here(devices))


@pytest.mark.parametrize("row", [1, 3, 8])
def test_a_row_says_how_many_devices_it_is_for(row):
    said = rf"this row takes {row} CUDA devices? \(devices=N scales it to N\) and torch sees 0 CUDA devices here"
    with pytest.raises(ConfigError, match=said):
        place(load_config("metaworld_pi0", [f"devices={row}"]), devices=0)


def test_a_kind_that_names_devices_is_not_placed_by_the_preset():
    cpu = {kind: {"devices": "cpu"} for kind in NAMES}
    assert {
        seat.device for seat in assign_seats(placement(preset="hybrid", **cpu), NAMES, devices_here(0)).values()
    } == {"cpu"}


def test_the_presets_on_eight_devices_are_those_of_the_paper():
    every = tuple(range(8))
    assert divide_devices("colocated", devices_here(8)) == {"simulators": every, "generators": every, "trainer": every}
    assert divide_devices("hybrid", devices_here(8)) == {
        "simulators": every[:6],
        "generators": every[6:],
        "trainer": every,
    }
    parts = divide_devices("disaggregated", devices_here(8))
    assert parts == {"simulators": every[:6], "generators": every[:6], "trainer": every[6:]}


@pytest.mark.parametrize(
    ("nodes", "generates", "trains"),
    [
        ((8, 8), (6, 7, 14, 15), (12, 13, 14, 15)),  # a node has both where its devices allow
        ((2, 2), (3,), (3,)),
        ((4, 4), (3, 7), (6, 7)),
        ((6, 2), (5, 7), (6, 7)),
        ((1,) * 8, (3, 7), (6, 7)),
        ((0, 3, 0, 5), (6, 7), (6, 7)),
        ((1, 1), (1,), (1,)),
    ],
)
def test_over_nodes_the_ratio_is_of_all_and_generators_of_hybrid_are_dealt_to_nodes(nodes, generates, trains):
    devices = Devices(tuple((f"n{index}", count) for index, count in enumerate(nodes)))
    every = tuple(range(devices.count))
    rest = tuple(number for number in every if number not in generates)
    assert divide_devices("hybrid", devices) == {"simulators": rest, "generators": generates, "trainer": every}
    parts = divide_devices("disaggregated", devices)
    assert parts == {"simulators": every[: -len(trains)], "generators": every[: -len(trains)], "trainer": trains}


def test_devices_that_a_cluster_lacks_are_told_by_node():
    nodes = Devices((("a", 2), ("b", 0), ("c", 1)))
    with pytest.raises(ConfigError, match=r"the cluster has 3 GPUs \(2 on a, 1 on c\); use cpu, or ids of 0-2"):
        assign_seats(placement(generators={"devices": "3"}), NAMES, nodes)
    with pytest.raises(ConfigError, match="the cluster has 0 GPUs; use cpu, or nodes that have GPUs"):
        assign_seats(placement(generators={"devices": "all"}), NAMES, Devices((("a", 0),)))


def test_simulated_devices_that_a_cluster_lacks_are_told_with_how_nodes_get_them():
    hint = r", which are counted as GPUs of its nodes \(`ray start --num-gpus N`\); "
    none, few = Devices((("a", 0),), SIMULATED), Devices((("a", 1), ("b", 0)), SIMULATED)
    for kind in ("all", "0"):
        with pytest.raises(MissingError, match=f"the cluster has 0 simulated devices{hint}use cpu"):
            assign_seats(placement(generators={"devices": kind}), NAMES, none)
    with pytest.raises(MissingError, match=f"the cluster has 0 simulated devices{hint}write placement=null"):
        divide_devices("colocated", none)
    takes = r"it takes at least 2 devices and the cluster has 1 simulated device \(1 on a\)"
    with pytest.raises(MissingError, match=f"{takes}{hint}write placement=colocated"):
        divide_devices("hybrid", few)


@pytest.mark.parametrize(
    ("sections", "devices", "ranks"),
    [
        ({}, 0, 1),
        ({}, 8, 1),
        ({"trainer": {"devices": "2,5"}}, 8, 2),
        ({"trainer": {"devices": "all"}}, 8, 8),
        ({"trainer": {"devices": "all"}}, 0, 1),
        ({"trainer": {"devices": "cpu"}, "preset": "colocated"}, 8, 1),
        ({"preset": "colocated"}, 3, 3),
        ({"preset": "disaggregated"}, 8, 2),
        ({"preset": "hybrid"}, 1, 1),
        ({"trainer": {"ranks": 4, "devices": "2,5"}}, 8, 4),
        ({"trainer": {"ranks": 4}}, 0, 4),
    ],
)
def test_the_trainer_has_the_ranks_that_are_set_else_one_for_each_of_its_devices(sections, devices, ranks):
    assert count_ranks(placement(**sections), devices_here(devices)) == ranks


def test_ranks_have_seats_in_turn_on_the_trainers_devices():
    stations = {"trainer": ["trainer", "trainer-rank1", "trainer-rank2"]}
    seats = assign_seats(placement(trainer={"ranks": 3, "devices": "2,5", "threads": 2}), stations, devices_here(8))
    assert [(seat.device, seat.threads) for seat in seats.values()] == [("cuda:2", 2), ("cuda:5", 2), ("cuda:2", 2)]
    assert group_seats(seats) == "trainer, trainer-rank2: cuda:2, 2 threads; trainer-rank1: cuda:5, 2 threads"
    (sentence,) = list_unused_devices(placement(trainer={"ranks": 1, "devices": "0-2"}), NAMES)
    assert sentence.endswith("because there are fewer ranks; raise placement.trainer.ranks to 3, or name fewer devices")


def test_ranks_are_named_in_the_seats_of_a_run():
    names = station_names(config(placement={"trainer": {"ranks": 2}}))
    assert names["trainer"] == ["trainer", "trainer-rank1"]
    assert station_names(config(placement={"trainer": {"ranks": 2}}), trainer=False)["trainer"] == []


def test_settings_of_sharding_need_the_strategy():
    assert placement(trainer={"strategy": "shard", "shard": {"cpu_offload": True}}).trainer.shard.cpu_offload
    words = r"shard.cpu_offload = true: it is for strategy shard, not replicate; leave it out, or set it to false"
    with pytest.raises(ValueError, match=words):
        placement(trainer={"shard": {"cpu_offload": True}})


RAGGED = {"groups": {"size": 4}, "algorithm": {"advantage": {"type": "grpo"}}, "rollout": {"segment_steps": 0}}


@pytest.mark.parametrize(
    ("changes", "ranks", "problems"),
    [
        ({}, 8, []),
        ({}, 9, ["ranks = 9: training.mini_batch_samples = 8 .*use at most 8 ranks, or a .*mini_batch_samples of 9"]),
        (RAGGED, 2, []),
        (RAGGED, 3, ["mini_batch_samples = 8 are 2 groups of 4 samples.*at most 2 ranks.*samples of 12 or"]),
        ({"training": {"minibatch_steps": 3}}, 3, []),
        ({"training": {"minibatch_steps": 3}}, 4, ["minibatch_steps = 3 is fewer .*at most 3 ranks, or .*of 4 or"]),
        ({"training": {"minibatch_steps": 3}, "launcher": "inline"}, 4, ["launcher = inline there", "is fewer than"]),
        ({"launcher": "inline"}, 1, []),
    ],
)
def test_an_update_that_cannot_be_dealt_to_the_ranks_is_refused_with_numbers_that_fit(changes, ranks, problems):
    settings = config(**{**changes, "placement": {"trainer": {"ranks": ranks}}})
    if not problems:
        check_ranks(settings, ranks)
        return
    with pytest.raises(ConfigError) as caught:
        check_ranks(settings, ranks)
    assert len(caught.value.problems) == len(problems)
    for problem, words in zip(caught.value.problems, problems, strict=True):
        assert problem.startswith(f"placement.trainer.ranks = {ranks}: ")
        assert re.search(words, problem), problem


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
    seats = assign_seats(placement(preset="colocated"), NAMES, devices_here(2))
    assert {name for name, seat in seats.items() if seat.environment} == set(NAMES["simulators"])


def test_more_devices_than_stations_are_told():
    (sentence,) = list_unused_devices(placement(generators={"devices": "0-3"}, simulators={"devices": "0-2"}), NAMES)
    assert sentence.startswith("placement.generators.devices = 0-3: 2, 3 stay unused, because there are fewer")
    assert sentence.endswith("raise rollout.generators to 4, or name fewer devices")


def test_stations_for_evaluation_have_seats_and_names_are_those_of_the_run():
    settings = config(evaluation={"every": 1, "every_episodes": 2, "weights": "own_generator"})
    names = station_names(settings)
    assert (names["simulators"][-1], names["generators"][-1]) == ("simulator-evaluation", "generator-evaluation")
    assert list(place(settings).seats) == [name for kind in names.values() for name in kind]
    assert "trainer" not in place(settings, trainer=False).seats


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({}, (1, 2, 4, 8, 16)),
        ({"placement": {"generators": {"devices": "cpu"}}}, ()),
        ({"rollout": {"rows": 10, "graphs": "off"}}, ()),
        ({"rollout": {"rows": 10, "buckets": "none"}}, ()),
        ({"rollout": {"rows": 10, "buckets": [12]}}, (12,)),
    ],
)
def test_passes_are_padded_by_default_where_generators_are_on_devices(sections, sizes):
    given = {"rollout": {"rows": 10}, "placement": {"generators": {"devices": "0"}}, **sections}
    settings = validate(merge(LOCKSTEP, given))
    infos = env_batch_infos(settings, env_settings(settings).spec())
    placed = place(settings, devices=1)
    assert bucket_sizes(settings, infos, on_device=placed.serves_on_device) == sizes


def test_ranges_and_ids_are_listed_in_their_order():
    assert list_device_ids("6,0-2") == (6, 0, 1, 2)


def test_a_row_for_more_devices_than_there_are_warns() -> None:
    (warning,) = place(load_config("metaworld_pi0"), devices=2).warnings
    assert warning == "devices = 8: there are 2 devices; add devices=2 to scale the row"
    assert place(load_config("metaworld_pi0", ["devices=2"]), devices=2).warnings == ()
    assert place(load_config("metaworld_pi0"), devices=8).warnings == ()


def test_devices_are_numbered_over_the_nodes_of_a_cluster_and_a_process_knows_its_own():
    cluster = Devices((("a", 2), ("b", 1), ("c", 3)))
    assert [cluster.place(number) for number in range(6)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("c", 0),
        ("c", 1),
        ("c", 2),
    ]
    with pytest.raises(IndexError):
        cluster.place(6)
    asked = placement(generators={"devices": "1,4"}, trainer={"devices": "0-3"}, simulators={"devices": "5"})
    names = {**NAMES, "trainer": [f"trainer-{rank}" for rank in range(4)]}
    seats = assign_seats(asked, names, cluster)
    found = {name: (seat.device, seat.node, seat.torch_device) for name, seat in seats.items()}
    assert (found["g0"], found["g1"]) == (("cuda:1", "a", "cuda:1"), ("cuda:4", "c", "cuda:1"))
    assert found["trainer-3"] == ("cuda:3", "c", "cuda:0")
    assert seats["s0"].environment["CUDA_VISIBLE_DEVICES"] == "2", "the third device of its node"
    assert find_ends(asked, names, seats) == Ends("cuda:0", ("cuda:1",)), "generators of other nodes take another way"


def test_simulated_devices_have_seats_and_compute_on_the_cpu():
    settings = config(placement={"preset": "disaggregated", "simulated_devices": 4})
    seats = place(settings).seats
    assert {seats[name].device for name in ("generator-0", "simulator-0")} == {"sim:0"}
    assert (seats["trainer"].device, seats["trainer"].torch_device) == ("sim:3", "cpu")
    assert seats["simulator-0"].environment == {}
