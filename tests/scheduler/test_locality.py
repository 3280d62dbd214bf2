"""Requests are served on their hosts where that costs no waiting: what starts when is as without the rule."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.long import tries
from tests.oracles.arbitrary import arbitrary_cluster, arbitrary_streams
from tests.oracles.guarantees import GuaranteeChecker, check_target_reached

from polyrhythm.conductors import build_conductor
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster, summarise
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.conductor import Conductor
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.routing import deal, exchange
from polyrhythm.scheduler.records import (
    Command,
    EnvBatchInfo,
    Event,
    GeneratorJoined,
    Request,
    RequestArrived,
    Serve,
    SimulatorJoined,
    SlotInfo,
    StartStream,
    TrainUntil,
    WeightsApplied,
    WeightsOffered,
)
from polyrhythm.scheduler.settings import SchedulerSettings


def asking(slot: str, rows: int = 1) -> Request:
    """Of the slot `host/number`."""
    return Request(slot, "sim", 1, rows, 0, "", 0.0)


def host_of(request: Request) -> str:
    return request.slot.partition("/")[0]


def generator(name: str, host: str, served: int = 0) -> GeneratorState:
    return GeneratorState(name, 0, served_rows=served, host=host)


def local(pairs: Sequence[tuple[GeneratorState, Sequence[Request]]]) -> int:
    return sum(request.rows for own, batch in pairs for request in batch if host_of(request) == own.host)


def test_batches_that_start_together_exchange_requests_of_equal_rows() -> None:
    one, two = generator("g0", "a"), generator("g1", "b")
    batches = [(asking("a/0"), asking("b/0"), asking("b/1", 2)), (asking("a/1", 2), asking("b/2"), asking("a/2"))]
    found = exchange(batches, [one, two], host_of)
    assert [[request.slot for request in batch] for batch in found] == [["a/0", "a/1", "a/2"], ["b/0", "b/1", "b/2"]]


def test_a_batch_goes_to_an_idle_generator_of_its_host_else_to_the_next_in_turn() -> None:
    idle = [generator("g0", "a"), generator("g1", "b"), generator("g2", "b")]
    assert [own.name for own, _ in deal([(asking("b/0"), asking("a/0"), asking("b/1"))], idle, host_of)] == ["g1"]
    assert [own.name for own, _ in deal([(asking("c/0"),)], idle, host_of)] == ["g0"]


hosts = st.sampled_from("abc")
requests = st.lists(st.tuples(hosts, st.integers(1, 3)), min_size=1, max_size=4)


@given(st.lists(requests, min_size=1, max_size=4), st.lists(hosts, min_size=4, max_size=6))
@settings(max_examples=tries(67, 200), deadline=None)
def test_the_same_requests_start_in_batches_of_the_same_rows_and_no_fewer_are_local(
    shapes: list[list[tuple[str, int]]], places: list[str]
) -> None:
    idle = [generator(f"g{i}", host) for i, host in enumerate(places)]
    batches, number = [], 0
    for shape in shapes:
        batches.append(tuple(asking(f"{host}/{number + i}", rows) for i, (host, rows) in enumerate(shape)))
        number += len(shape)
    dealt = deal(batches, idle, host_of)
    assert len({own.name for own, _ in dealt}) == len(batches)
    assert Counter(r.slot for batch in batches for r in batch) == Counter(r.slot for _, batch in dealt for r in batch)
    shape_of = [sorted(request.rows for request in batch) for batch in batches]
    assert [sorted(request.rows for request in batch) for _, batch in dealt] == shape_of
    assert local(dealt) >= local(list(zip(idle, batches, strict=False)))
    again = deal(batches, idle, host_of)
    assert again == dealt


# ---------------------------------------------------------------- in the conductor


class OnHosts(Conductor):
    """A conductor whose stations are on two hosts in turn, as their numbers are even or odd."""

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, SimulatorJoined | GeneratorJoined):
            name = event.simulator if isinstance(event, SimulatorJoined) else event.generator
            event = replace(event, host="ab"[int(name.rpartition("-")[2]) % 2 if name[-1].isdigit() else 0])
        return Conductor.handle(self, event, now)


def on_hosts(found: ClusterSettings) -> ClusterSettings:
    """The cluster with its groups on two hosts in turn."""
    groups = {
        kind: tuple(group.model_copy(update={"host": "ab"[i % 2]}) for i, group in enumerate(getattr(found, kind)))
        for kind in ("simulators", "generators")
    }
    return found.model_copy(update=groups)


@given(st.randoms(use_true_random=False))
@settings(max_examples=tries(8, 20), deadline=None, suppress_health_check=list(HealthCheck))
def test_no_guarantee_is_broken_on_hosts(rng: random.Random) -> None:
    found = on_hosts((arbitrary_streams if rng.random() < 0.3 else arbitrary_cluster)(rng))
    conductor = build_conductor(found.scheduler)
    cluster = VirtualCluster(found, conductor)
    check_target_reached(cluster, conductor, GuaranteeChecker(cluster, conductor))


def test_many_idle_generators_do_not_make_a_batch_dearer() -> None:
    """Where a request lies is asked as often with 500 idle generators as with 5."""

    def questions(count: int) -> int:
        asked = 0

        def counting(request: Request) -> str:
            nonlocal asked
            asked += 1
            return host_of(request)

        deal(
            [(*map(asking, ("a/0", "b/0", "a/1")),)], [generator(f"g{n}", "abc"[n % 3]) for n in range(count)], counting
        )
        return asked

    assert questions(500) == questions(5)


@pytest.mark.parametrize(
    ("serve", "scheduler", "least"),
    [
        ("4ms", {"batching": "lockstep", "max_lag": 0, "on_update": "drain"}, 0.99),
        ("0.5ms", {"batching": "dynamic", "max_wait_s": 0.0}, 0.7),
        ("4ms", {"batching": "dynamic", "max_rows": 2, "max_wait_s": 0.002}, 0.5),
    ],
    ids=["lockstep", "idle", "busy"],
)
def test_a_simulated_run_serves_more_rows_on_their_hosts_at_the_same_times(
    serve: str, scheduler: dict[str, Any], least: float
) -> None:
    """Two hosts, each with two simulators and a generator. Busy generators leave little to choose."""
    step = "lognormal:10ms:0.5"
    plain = {
        "versions": 6,
        "scheduler": {"batch_size": 32, **scheduler},
        "simulators": [{"count": 2, "slots": 4, "steps": 20, "step": step, "host": host} for host in "ab"],
        "generators": [{"serve": serve, "host": host} for host in "ab"],
    }
    found = []
    for kind in (Blind, Conductor):
        cluster_settings = ClusterSettings.model_validate(plain)
        cluster = VirtualCluster(cluster_settings, kind(cluster_settings.scheduler))
        cluster.run()
        found.append(summarise(cluster.driver, {}))
    blind, near = found
    assert near["requests"]["local"] >= least
    assert near["requests"]["local"] > blind["requests"]["local"]
    assert near["virtual_s"] == pytest.approx(blind["virtual_s"])
    for name in ("served", "batches", "wait_s"):
        assert near["requests"][name] == pytest.approx(blind["requests"][name])


class Blind(Conductor):
    """A conductor that is told of no host."""

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, SimulatorJoined | GeneratorJoined):
            event = replace(event, host="")
        return Conductor.handle(self, event, now)


def conductor_of(kind: type[Conductor], batching: str, **settings: float) -> Conductor:
    """Two generators, and two simulators of four slots with a row each, which all hold tickets."""
    conductor = kind(SchedulerSettings(batch_size=64, batching=batching, **settings))  # type: ignore[arg-type]
    for i in range(2):
        slots = tuple(SlotInfo(f"sim-{i}/{k}", k, 1) for k in range(4))
        conductor.handle(SimulatorJoined(f"sim-{i}", 0, (EnvBatchInfo(f"sim-{i}.0", slots),)), 0.0)
        conductor.handle(GeneratorJoined(f"gen-{i}", 0), 0.0)
    conductor.handle(WeightsOffered(0), 0.0)
    for i in range(2):
        conductor.handle(WeightsApplied(f"gen-{i}", 0, 0), 0.0)
    conductor.handle(TrainUntil(1), 0.0)
    return conductor


def ask(conductor: Conductor, slots: Sequence[str], now: float) -> list[Command]:
    commands = []
    for slot in slots:
        simulator = slot.partition("/")[0]
        commands += conductor.handle(RequestArrived(simulator, 0, slot, 0, 1, 0, ""), now)
    return commands


@pytest.mark.parametrize(("batching", "settings"), [("lockstep", {}), ("dynamic", {"max_rows": 4, "max_wait_s": 9.0})])
def test_of_what_starts_together_every_request_is_served_on_its_host(batching: str, settings: dict[str, float]) -> None:
    """In lockstep all eight start at once; dynamically a batch of four starts where most of it lies."""
    order = [f"sim-{i}/{k}" for k in range(4) for i in range(2)]
    if batching == "dynamic":
        order = [f"sim-1/{k}" for k in range(4)] + [f"sim-0/{k}" for k in range(4)]
    served = {}
    for kind in (Conductor, OnHosts):
        commands = ask(conductor_of(kind, batching, **settings), order, 1.0)
        serves = [command.batch for command in commands if isinstance(command, Serve)]
        assert [len(batch.requests) for batch in serves] == [4, 4]
        served[kind] = sum(request.slot[4] == batch.generator[4] for batch in serves for request in batch.requests)
    assert served[OnHosts] == 8
    assert served[Conductor] < 8


def test_a_stream_begins_on_its_host_while_that_has_no_more_rows_under_way_than_the_other_would_have() -> None:
    slots = [f"sim-1/{k}" for k in range(4)]
    started = {}
    for kind in (Conductor, OnHosts):
        commands = ask(conductor_of(kind, "streams", max_rows=8), slots, 1.0)
        started[kind] = [command.generator for command in commands if isinstance(command, StartStream)]
    assert started[Conductor] == ["gen-0", "gen-1", "gen-0", "gen-1"]
    assert started[OnHosts] == ["gen-1", "gen-1", "gen-0", "gen-1"]
