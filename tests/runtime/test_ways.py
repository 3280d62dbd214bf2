"""Which way weights take, by where the ends live; what was moved, in numbers; what log and summary say of it."""

from __future__ import annotations

import logging

import pytest
from tests.conformance.weights import Module, layout_of, state

from polyrhythm.pipeline.observers.totals import WeightsTraffic
from polyrhythm.runtime.memory.device_weights import DeviceWeights, can_reach
from polyrhythm.runtime.memory.process_memory import open_weights
from polyrhythm.runtime.memory.published import (
    APPLY,
    PUBLISHED,
    SHARDS,
    Choice,
    Ends,
    Traffic,
    choose_way,
    keeps_copy,
    read_traffic,
    shared_nbytes,
)
from polyrhythm.runtime.memory.weights import SharedWeights

RATE = "4 MB in 2 ms, 2 GB/s (mean of 3)"
SHARDED = "the trainer's weights are sharded"


def pairs(*linked):
    """Devices of a machine on which the devices of each pair read each other's memory."""
    return lambda device, other: (device, other) in linked or (other, device) in linked


ALL = pairs(("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:1", "cuda:2"))


@pytest.mark.parametrize(
    ("trainer", "generator", "reaches", "expected"),
    [
        ("cpu", "cpu", ALL, Choice("host", "the generator is on the CPU")),
        ("cuda:0", "cpu", ALL, Choice("host", "the generator is on the CPU")),
        ("cpu", "cuda:0", ALL, Choice("host", "weights are published by a process on the CPU")),
        ("cuda:0", "cuda:0", pairs(), Choice("ipc", "trainer and generator are on cuda:0")),
        ("cuda:0", "cuda:1", ALL, Choice("peer", "cuda:1 can read the memory of cuda:0")),
        ("cuda:0", "cuda:1", pairs(("cuda:1", "cuda:2")), Choice("host", "cuda:1 cannot read the memory of cuda:0")),
    ],
)
def test_the_way_follows_from_where_the_ends_live(trainer, generator, reaches, expected):
    assert choose_way(Ends(trainer, (generator,)), generator, reaches) == expected


def test_within_one_process_the_publication_itself_is_read():
    ends = Ends("cuda:0", ("cuda:0",), one_process=True)
    assert choose_way(ends, "cuda:0", pairs()).way == "reference"
    assert keeps_copy(ends, pairs())
    assert choose_way(Ends("cpu", ("cpu",), one_process=True), "cpu", pairs()).way == "host"


def test_ends_that_may_have_nothing_whole_on_a_device_use_the_host():
    ends = Ends("cuda:0", ("cuda:0", "cuda:1", "cpu"), SHARDED)
    assert choose_way(ends, "cuda:0", ALL) == choose_way(ends, "cuda:1", ALL) == ("host", SHARDED)
    assert not keeps_copy(ends, ALL)


@pytest.mark.parametrize(
    ("generators", "reaches", "kept"),
    [
        (("cpu", "cpu"), ALL, False),
        (("cpu", "cuda:0"), pairs(), True),
        (("cuda:1", "cuda:1"), pairs(), False),
        (("cuda:1", "cuda:2"), pairs(("cuda:0", "cuda:2")), True),
        ((), ALL, False),
    ],
)
def test_the_trainer_keeps_a_copy_on_its_device_only_if_a_generator_takes_it_from_there(generators, reaches, kept):
    assert keeps_copy(Ends("cuda:0", generators), reaches) is kept


@pytest.mark.parametrize(
    ("device", "ends", "way"),
    [
        ("sim:1", Ends("sim:0", ("sim:1",)), "peer"),
        ("sim:0", Ends("sim:0", ("sim:1", "sim:0")), "ipc"),
        ("sim:1", Ends("sim:0", ("sim:1",), SHARDED), ""),
        ("cpu", Ends("sim:0", ("sim:0", "cpu")), ""),
        ("sim:0", Ends("cpu", ("sim:0",)), ""),
        ("sim:1", None, ""),
    ],
)
def test_a_process_opens_its_end_for_the_way(device, ends, way, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    layout = layout_of(Module())
    memory = bytearray(shared_nbytes(layout))

    def opened(device):
        return open_weights(layout, memoryview(memory), tmp_path, device, ends)

    found = opened(device)
    if not way:
        assert isinstance(found, SharedWeights)
        return
    assert isinstance(found, DeviceWeights)
    assert caplog.messages == [f"weights at {device}: {way}, because {choose_way(ends, device, can_reach).why}"]
    trainer = opened(ends.trainer)
    trainer.publish(4, state(4))
    into = Module(7)
    assert found.fetch(4, into.state_dict()).way == way, "the trainer has kept a copy"
    assert into.values() == [4]


@pytest.mark.parametrize(("generator", "kept"), [("sim:1", True), ("cpu", False)])
def test_a_trainer_copies_to_its_device_only_for_those_that_reach_it(generator, kept, tmp_path):
    layout, ends = layout_of(Module()), Ends("sim:0", (generator,))
    memory = memoryview(bytearray(shared_nbytes(layout)))
    found = open_weights(layout, memory, tmp_path, "sim:0", ends)
    found.publish(4, state(4))
    assert (tmp_path / "weights.device").exists() is kept


def test_traffic_goes_through_counters_and_back():
    traffic = Traffic()
    traffic.add("host", 1_500_000, 0.001)
    traffic.add("host", 2_500_000, 0.003)
    traffic.add(APPLY, 2_000_000, 0.5)
    found = read_traffic({"passes": 7.0, **traffic.statistics()})
    assert found == traffic.moved
    assert (found["host"].versions, found["host"].mb, found["host"].gb_per_s) == (2, 2.0, pytest.approx(1.0))
    assert (found[APPLY].ms, found[APPLY].gb_per_s) == (500.0, pytest.approx(0.004))
    assert read_traffic({"busy_s": 3.0}) == {}


def test_senders_go_through_counters_and_back():
    traffic = Traffic()
    traffic.add("tcp", 30, 0.1, {"host-1": 20, "host-2": 10})
    traffic.add("tcp", 30, 0.1, {"host-1": 30})
    found = read_traffic(traffic.statistics())
    assert found == traffic.moved
    assert found["tcp"].sources == {"host-1": 50, "host-2": 10}


class Counters:
    """A launcher's counters."""

    def __init__(self):
        self.now = {}

    def add(self, station, *kinds, sources=()):
        traffic = Traffic()
        for kind in kinds:
            traffic.add(kind, 4_000_000, 0.002, dict(sources) if kind != APPLY else {})
        self.now[station] = {"busy_s": 1.0, **traffic.statistics()}

    @property
    def hosting(self):
        return self

    def statistics(self, *, fresh=False):
        return self.now


def test_the_log_says_way_reason_and_rate_of_each_generator_once(caplog):
    caplog.set_level(logging.INFO)
    counters = Counters()
    devices = {"generator-0": "cpu", "generator-1": "cuda:0", "generator-2": "cuda:1", "trainer": "cuda:0"}
    observer = WeightsTraffic(counters, Ends("cuda:0", tuple(devices.values())[:3]), devices)
    counters.add("generator-0", "host", APPLY, "host", APPLY)
    observer.on_tick(0.0)
    assert not caplog.messages, "two versions are too few for a rate"
    counters.add("generator-0", *("host", APPLY) * 3)
    counters.add("generator-1", *("host", APPLY) * 3)
    for _ in range(2):
        observer.on_tick(1.0)
    assert caplog.messages == [
        "generator-0: weights come by host, because the generator is on the CPU; " + RATE,
        "generator-1: weights come by host, because ipc could not serve at once (its log says why); " + RATE,
    ]
    caplog.clear()
    counters.add("generator-2", "peer", APPLY)
    counters.add("trainer", PUBLISHED, PUBLISHED)
    observer.summary()
    observer.summary()
    assert caplog.messages == [
        "generator-2: weights come by peer, because cuda:1 can read the memory of cuda:0; "
        + RATE.replace("of 3", "of 1")
    ]
    one = {"versions": 1, "mb": 4.0, "ms": 2.0, "gb_per_s": pytest.approx(2.0)}
    assert observer.summary()["generator-2"] == {"peer": one, "apply": one}
    assert observer.summary()["trainer"] == {"published": {**one, "versions": 2}}


@pytest.mark.parametrize(
    ("way", "sources", "said"),
    [
        ("tcp", {"host-2": 4}, "tcp from host-2, because the trainer is on another host"),
        ("tcp", {"host-2": 1, "main": 3}, "tcp from main (75%), host-2 (25%), because the trainer is on another host"),
        ("pair", {"host-1": 4}, "pair from host-1, because the trainer is on a device of another host"),
    ],
)
def test_the_log_says_which_hosts_sent_what_and_that_ranks_publish_together(way, sources, said, caplog):
    caplog.set_level(logging.INFO)
    counters = Counters()
    observer = WeightsTraffic(counters, Ends("cpu", ("cpu",)), {"generator-0": "cpu", "trainer": "cpu"})
    counters.add("generator-0", *(way, APPLY) * 3, sources=sources)
    counters.add("trainer", *(SHARDS,) * 3)
    observer.on_tick(0.0)
    assert caplog.messages == [
        f"generator-0: weights come by {said}; {RATE}",
        f"trainer: weights are published by all ranks, each its own rows; {RATE}",
    ]
    three = {host: 3 * count for host, count in sources.items()}
    assert observer.summary()["generator-0"][way]["from"] == three
