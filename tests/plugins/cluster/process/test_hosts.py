"""Runs on several hosts without a cluster: hosts are apart by memory, some by network too."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.long import long
from tests.pipeline.test_streams import LANGUAGE
from tests.process.networks import HERE, apart_by_setting, behind_a_link
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, children, config, orphaned_folders

from polyrhythm.errors import StartError
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.cluster.hosts.agent import LocalNode
from polyrhythm.plugins.cluster.launching import launch_on
from polyrhythm.runtime.hosting import dropped_messages, process_ids, station_hosts
from polyrhythm.runtime.memory.published import read_traffic
from polyrhythm.scheduler import records

VERSIONS = 4
AGENT = "polyrhythm.plugins.cluster.hosts.agent"


@contextmanager
def running(folder: Path, nodes: Sequence[LocalNode] = (), base: dict = ASYNCHRONOUS, **changes) -> Iterator[Pipeline]:
    pipeline = build_pipeline(
        RunContext(config(base, **changes), folder=folder, launch=launch_on(nodes) if nodes else None), record=True
    )
    try:
        yield pipeline
    finally:
        pipeline.close()
        assert not children()
        assert not orphaned_folders()


def check_complete(pipeline: Pipeline) -> None:
    """Every sample is trained once, none is left, and nothing that was said was dropped."""
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    lent = Counter(t for command in commands if isinstance(command, records.StartUpdate) for t in command.tickets)
    ledger = pipeline.loop.conductor.ledger
    assert ledger.as_dict()["trained"] == len(lent)
    assert set(lent.values()) == {1}
    assert (ledger.imbalance, ledger.running, pipeline.launcher.payloads.in_flight.finished()) == (0, 0, ())
    assert dropped_messages(pipeline.launcher.hosting) == {}
    assert pipeline.weights.read()[0] == VERSIONS == pipeline.weights.newest


def ways(pipeline: Pipeline, generators: int = 2) -> dict[str, set[str]]:
    """By which ways weights came to each generator."""
    statistics = pipeline.launcher.hosting.statistics(fresh=True)
    names = [f"generator-{i}" for i in range(generators)]
    return {name: set(read_traffic(statistics[name])) - {"apply"} for name in names}


class Reader(Observer):
    """Reads every sample as soon as main hears of it."""

    hears = (records.SampleFinished,)

    def __init__(self, pipeline: Pipeline) -> None:
        self._payloads, self.read = pipeline.launcher.payloads, Counter[str]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if isinstance(event, records.SampleFinished):
            assert self._payloads.read(event.payload_id).ticket == event.ticket
            self.read[event.simulator] += 1


def test_a_run_on_two_hosts_is_complete_and_leaves_nothing(tmp_path: Path) -> None:
    """A simulator and both generators are on the second host: a version crosses once, its processes share it, and main
    reads what lies there."""
    one, two = apart_by_setting(tmp_path, 2)
    with running(tmp_path / "run", [one, two, two, two, one]) as pipeline:
        reader = Reader(pipeline)
        pipeline.loop.add_observers(reader)
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        statistics = pipeline.launcher.hosting.statistics(fresh=True)
        moved = [read_traffic(statistics[f"generator-{i}"]) for i in range(2)]
        crossed = sum(each["tcp"].versions for each in moved if "tcp" in each)
        taken = sum(each["apply"].versions for each in moved)
    assert crossed <= VERSIONS + 1 < taken
    assert set(reader.read) == {"simulator-0", "simulator-1"}
    assert reader.read.total() >= VERSIONS * 8
    assert [list((tmp_path / f"memory-{i}").iterdir()) for i in range(2)] == [[], []]


@pytest.mark.slow
@long(25, "a language model on two hosts")
def test_a_stream_answers_the_prompt_of_another_host(tmp_path: Path) -> None:
    """Lengths of sampled answers follow from prompt, noise key and weights: equal on one host and on two."""
    changes = {**LANGUAGE, "launcher": "local", "rollout": {"rows": 8, "sharding": "even:8"}}
    found = []
    for name, nodes in (("one", ()), ("two", apart_by_setting(tmp_path, 2))):
        with running(tmp_path / name, [*nodes[:1], *nodes[1:], *nodes[:1]], base=changes) as pipeline:
            pipeline.loop.evaluate("before", held_out(16, 4, 1, greedy=False))
            pipeline.loop.train_until(1)
            assert not nodes or ways(pipeline, 1) == {"generator-0": {"tcp"}}
            commands = [command for decision in pipeline.loop.trace for command in decision.commands]
            ended = [(c.seed, c.metrics) for c in commands if isinstance(c, records.SampleEvaluated)]
            found.append(sorted(ended))
    assert len(found[0]) == 16
    assert len({metrics for _, metrics in found[0]}) > 1, "answers differ between episodes"
    assert found[0] == found[1]


@long(9, "scorers on two hosts")
def test_scorers_of_another_host_score_what_lies_on_this_one(tmp_path: Path) -> None:
    """Also an evaluation's samples, which are kept for them. Stations: simulator, generator, two scorers, trainer."""
    one, two = apart_by_setting(tmp_path, 2)
    changes = {
        "rollout": {"simulators": 1, "generators": 1, "segment_steps": 0},
        "scoring": {"function": "tests.process.rewards:by_seed", "processes": 2},
    }
    with running(tmp_path / "run", [one, one, two, two, one], **changes) as pipeline:
        results = pipeline.loop.evaluate("before", held_out(4, 4, 1, greedy=True))
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        conductor, trace = pipeline.loop.conductor, pipeline.loop.trace
    updates = [c for decision in trace for c in decision.commands if isinstance(c, records.StartUpdate)]
    for update in updates:
        seeds = [conductor.rollout.admission.start_of(ticket)[1] for ticket in update.tickets]
        assert update.scores == tuple(float(seed % 7) for seed in seeds)
    assert len(results) == 4
    assert all(result.episode_return == result.env_steps + result.seed % 7 for result in results)
    tries = [c for decision in trace for c in decision.commands if isinstance(c, records.ScoreSample)]
    assert {command.scorer for command in tries} == {"scorer-0", "scorer-1"}


def test_lockstep_gives_the_same_weights_on_three_hosts_as_on_one(tmp_path: Path) -> None:
    """Requests, samples and weights all cross: the simulator, the generator and the trainer are each on their own."""
    found = []
    for name, nodes in (("inline", ()), ("local", apart_by_setting(tmp_path, 3))):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, nodes, LOCKSTEP, launcher=name) as pipeline:
            pipeline.loop.train_until(2)
            found.append(pipeline.weights.read()[1])
    one, three = found
    assert all(torch.equal(one[name], three[name]) for name in one)


def remote_rows(pipeline: Pipeline) -> tuple[int, int]:
    """Rows of requests that were served on another host than theirs, and all."""
    serving = pipeline.loop.conductor.serving
    host_of = {name: generator.host for name, generator in serving.generators.present.items()}
    assert len(set(host_of.values())) == 2
    remote = every = 0
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    for batch in (command.batch for command in commands if isinstance(command, records.Serve)):
        for request in batch.requests:
            every += request.rows
            remote += request.rows * (serving.host_of(request) != host_of[batch.generator])
    return remote, every


@long(7, "the rule of locality in real processes; simulations run it too")
def test_in_lockstep_no_observation_crosses_where_each_host_has_simulator_and_generator(tmp_path: Path) -> None:
    """Without the rule about half of them do."""
    base = {**LOCKSTEP, "rollout": {"simulators": 2, "rows": 5, "generators": 2}}
    with running(tmp_path / "run", apart_by_setting(tmp_path, 2), base) as pipeline:
        pipeline.loop.train_until(2)
        remote, every = remote_rows(pipeline)
    assert remote == 0 < every


@long(12, "a run whose generator has a pair; test_pairs.py has its mechanism")
def test_a_generator_on_a_device_of_another_host_takes_weights_by_a_pair(tmp_path: Path) -> None:
    placement = {"simulated_devices": 2, "trainer": {"devices": "0"}, "generators": {"devices": "0,1"}}
    with running(tmp_path / "run", apart_by_setting(tmp_path, 2), placement=placement) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        at = station_hosts(pipeline.launcher.hosting)
        found = ways(pipeline)
    assert at["generator-1"] != at["trainer"] == at["generator-0"] == "host-1", "main's is none of these"
    assert "ipc" in found["generator-0"] <= {"ipc", "host"}
    assert "pair" in found["generator-1"] <= {"pair", "tcp"}
    (log,) = (tmp_path / "run" / "logs").rglob("generator-1*.log")
    assert "by a pair (gloo, as devices are simulated)" in log.read_text()


@long(5, "nodes of one host")
def test_nodes_that_share_memory_are_one_host(tmp_path: Path) -> None:
    nodes = [LocalNode("a"), LocalNode("b")]
    with running(tmp_path / "run", nodes) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        assert ways(pipeline) == {"generator-0": {"host"}, "generator-1": {"host"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param("simulator-1", marks=long(5, "a simulator of another host")),
        pytest.param("generator-1", marks=long(8, "a generator of another host")),
        pytest.param("trainer", marks=long(8, "a trainer of another host")),
    ],
)
def test_a_killed_station_of_another_host_is_replaced(lost: str, tmp_path: Path) -> None:
    one, two = apart_by_setting(tmp_path, 2)
    with running(tmp_path / "run", [one, two, one, two, two]) as pipeline:
        pipeline.loop.train_until(1)
        os.kill(process_ids(pipeline.launcher.hosting)[lost], signal.SIGKILL)
        pipeline.loop.train_until(VERSIONS)
        assert pipeline.weights.newest == VERSIONS
        assert pipeline.loop.conductor.ledger.imbalance == 0


@pytest.mark.slow
@long(8, "an agent that is silent")
def test_an_agent_that_is_silent_for_less_than_heartbeat_s_costs_nothing(tmp_path: Path) -> None:
    """The trainer's, which is stopped for 6 s while a simulator of another host is lost; a request is fetched from
    there meanwhile."""
    one, two = apart_by_setting(tmp_path, 2)
    with running(tmp_path / "run", [two, one, two, one, one], training={"versions": 1000}) as pipeline:
        pipeline.loop.train_until(1)
        (agent,) = [process for process in children() if process.cmdline()[-2:] == [AGENT, "host-1"]]
        agent.suspend()
        resume = threading.Timer(6.0, agent.resume)
        resume.start()
        os.kill(process_ids(pipeline.launcher.hosting)["simulator-0"], signal.SIGKILL)
        version = 2
        while resume.is_alive():
            pipeline.loop.train_until(version)
            version += 1
        pipeline.loop.train_until(version + 2)
        lost = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.StationLost)]
        assert [event.station for event in lost] == ["simulator-0"]
        assert not [d for d in pipeline.loop.trace if isinstance(d.event, records.PayloadsLost)]


class Killer(Observer):
    """Kills all processes of host-2 as soon as a sample that one of its simulators finished waits for the trainer."""

    hears = (records.SampleFinished,)

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.waited, self.killed = pipeline, "", list[int]()

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        if self.waited or not isinstance(event, records.SampleFinished) or event.simulator != "simulator-1":
            return
        if any(isinstance(command, records.StartUpdate) for command in commands):
            return
        self.waited = event.payload_id
        stations = [process_ids(self._pipeline.launcher.hosting)[name] for name in ("simulator-1", "generator-1")]
        (agent,) = [process.pid for process in children() if process.cmdline()[-2:] == [AGENT, "host-2"]]
        self.killed = [agent, *stations]
        for pid in self.killed:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_samples_of_a_lost_host_run_again_and_its_stations_go_elsewhere(tmp_path: Path) -> None:
    one, two = apart_by_setting(tmp_path, 2)
    changes = {"freshness": {"max_lag": 2}, "training": {"versions": 6}, "supervision": {"heartbeat_s": 6.0}}
    with running(tmp_path / "run", [one, two, one, two, one], **changes) as pipeline:
        killer = Killer(pipeline)
        pipeline.loop.add_observers(killer)
        pipeline.loop.train_until(6)
        lost = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.PayloadsLost)]
        assert "host-2" in {event.host for event in lost}
        assert killer.waited in {payload_id for event in lost for payload_id in event.payload_ids}
        processes = process_ids(pipeline.launcher.hosting)
        assert not {processes["simulator-1"], processes["generator-1"]} & set(killer.killed)
        updates = {}  # an update whose samples were lost is refused and lent again
        for command in (command for decision in pipeline.loop.trace for command in decision.commands):
            if isinstance(command, records.StartUpdate):
                updates[command.update] = command.tickets
        trained = [ticket for tickets in updates.values() for ticket in tickets]
        ledger = pipeline.loop.conductor.ledger
        assert ledger.trained == len(trained) == len(set(trained)) == 6 * 8
        assert (ledger.imbalance, ledger.dropped_total, pipeline.weights.newest) == (0, 0, 6)


LINKS = {
    "200-mbit": ("tbf", "rate", "200mbit", "burst", "64kb", "latency", "50ms"),
    "delay-and-loss": ("netem", "delay", "5ms", "loss", "0.5%"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "quality",
    [
        pytest.param((), marks=long(4, "a link without limits"), id="free"),
        pytest.param(LINKS["200-mbit"], marks=long(6, "a link of 200 Mb/s"), id="200-mbit"),
        pytest.param(LINKS["delay-and-loss"], id="delay-and-loss"),
    ],
)
def test_a_run_crosses_a_link_between_network_namespaces(quality: tuple[str, ...], tmp_path: Path) -> None:
    with behind_a_link(tmp_path, *quality) as (here, there):
        assert here.address == HERE
        with running(tmp_path / "run", [here, there]) as pipeline:
            pipeline.loop.train_until(VERSIONS)
            check_complete(pipeline)
            assert ways(pipeline)["generator-1"] == {"tcp"}


def test_a_host_without_memory_is_refused_before_anything_starts(tmp_path: Path) -> None:
    nodes = [LocalNode("far", environment={"POLYRHYTHM_SHARED_MEMORY": str(tmp_path / "nowhere")})]
    checked, folder = validate_run(config()), tmp_path / "run"
    folder.mkdir()
    with pytest.raises(StartError, match=r"far: POLYRHYTHM_SHARED_MEMORY = .*nowhere is no folder"):
        train(checked, folder, launch=launch_on(nodes))
    assert not children()
    assert not orphaned_folders()
    assert not list(folder.iterdir()), "nothing of the run was made"
