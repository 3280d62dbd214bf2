"""Runs on a Ray cluster: one of this machine's own, and three nodes that are hosts of their own. What each change has
to pass is in `test_on_one_ray.py`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.long import long
from tests.plugins.cluster.process.test_hosts import VERSIONS, check_complete, running, ways
from tests.plugins.ranks.test_runs import ONE as SEVERAL_STEPS
from tests.process.networks import memory
from tests.process.runs import (
    LOCKSTEP,
    PATIENCE_S,
    children,
    command,
    config,
    gone,
    orphaned_folders,
    wait_for_updates,
    wait_until,
)
from tests.process.test_supervision import lost

from polyrhythm.config.load import load_config
from polyrhythm.errors import HostLost, MissingError, RunHalted, StartError
from polyrhythm.observe.run_folder import CONFIG_FILE
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.callbacks import Callbacks
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.cluster.ray.reach import check_launcher
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.memory.shared_folder import remove_orphans, shared_root

RAY: dict[str, Any] = {"launcher": "ray"}
TEMPORARY = Path(tempfile.gettempdir())
LONG = long(30, "with a Ray of its own")


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="the ray extra is not installed")


@pytest.fixture
def three_nodes(ray: Any, tmp_path: Path) -> Iterator[Any]:
    """A cluster of three nodes, each of which has a memory of its own."""
    yield from cluster_with(tmp_path, "one", "two")


@pytest.fixture
def two_nodes(ray: Any, tmp_path: Path) -> Iterator[Any]:
    """The same, but no station has room on the head node."""
    yield from cluster_with(tmp_path, "one", "two", head_cpus=0)


def cluster_with(folder: Path, *names: str, head_cpus: int = 2) -> Iterator[Any]:
    return cluster_of(folder, {"num_cpus": head_cpus}, **{name: {"num_cpus": 2} for name in names})


def cluster_of(folder: Path, head: Mapping[str, int], **nodes: Mapping[str, int]) -> Iterator[Any]:
    """A cluster, and the resources of its head and of its other nodes by name."""
    from ray.cluster_utils import Cluster

    own = {"include_dashboard": False, **node(folder, "head"), **head}
    cluster = Cluster(initialize_head=True, head_node_args=own)
    try:
        for name, resources in nodes.items():
            cluster.add_node(**{**node(folder, name), **resources})
        yield cluster
    finally:
        cluster.shutdown()


def node(folder: Path, name: str) -> dict[str, Any]:
    """What a node is started with."""
    return {"num_cpus": 2, "env_vars": memory(folder, name), "object_store_memory": 80 * 2**20}


@LONG
def test_a_run_on_a_cluster_of_its_own_is_complete_and_leaves_nothing(ray: Any, tmp_path: Path) -> None:
    with running(tmp_path / "run", **RAY) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        assert ways(pipeline) == {"generator-0": {"host"}, "generator-1": {"host"}}
        nice = {psutil.Process(pid).nice() for pid in process_ids(pipeline.launcher.hosting).values()}
        assert nice == {psutil.Process().nice()}, "Ray's workers have 15 more"
    assert not ray.is_initialized()
    assert len(list((tmp_path / "run" / "logs").glob("*.log"))) == 5


@LONG
def test_a_killed_driver_leaves_no_process_and_no_memory_but_a_folder_that_the_next_run_removes(
    ray: Any, tmp_path: Path
) -> None:
    """Ray's folder, in which Ray may still be writing when its processes are killed."""
    with command(tmp_path, **RAY, ray={"cpus_per_station": 0.25}, training={"versions": 100_000}) as process:
        wait_for_updates(tmp_path, 2, process)
        (memory,), (temporary,) = folders_of(process.pid, shared_root()), folders_of(process.pid, TEMPORARY)
        ours = of_runs(psutil.Process(process.pid).children(recursive=True))
        assert len(ours) == 6, "five stations and the agent of their host"
        process.kill()
        assert gone(ours)
    wait_until(lambda: not memory.exists())
    assert temporary in remove_orphans(TEMPORARY)
    assert not temporary.exists()


@LONG
@pytest.mark.parametrize("process", ["raylet/raylet", "RuntimeEnvAgent"])
def test_a_cluster_of_its_own_that_ends_is_told_within_a_heartbeat(process: str, ray: Any, tmp_path: Path) -> None:
    with running(tmp_path / "run", **RAY) as pipeline:
        pipeline.loop.train_until(1)
        (found,) = [
            child
            for child in psutil.Process().children(recursive=True)
            if child.status() != psutil.STATUS_ZOMBIE and process in " ".join(child.cmdline()[:1])
        ]
        found.kill()
        begin = time.monotonic()
        with pytest.raises(RunHalted, match=r"Ray cluster of this run is lost: its raylet has ended; .* with resume"):
            pipeline.loop.train_until(100_000)
        assert time.monotonic() - begin < 20.0, "supervision.heartbeat_s"
    assert not ray.is_initialized()


@LONG
def test_a_killed_driver_leaves_nothing_on_the_nodes_of_a_cluster(three_nodes: Any, tmp_path: Path) -> None:
    settings = {"address": three_nodes.address, "strategy": "spread"}
    with command(tmp_path, **RAY, ray=settings, training={"versions": 100_000}) as process:
        wait_for_updates(tmp_path, 2, process)
        (own,) = folders_of(process.pid, shared_root())
        ours = of_runs(children())
        assert len(ours) > 8, "five stations, and an agent on each host"
        process.kill()
        assert gone(ours)
    wait_until(lambda: not own.exists())
    wait_until(lambda: [list(folder.iterdir()) for folder in tmp_path.glob("memory-*")] == [[], [], []])


def folders_of(pid: int, root: Path) -> list[Path]:
    """What this run's main process has below the folder."""
    return [owner.parent for owner in root.glob(f"polyrhythm-{os.getuid()}-*/owner") if owner.read_text() == str(pid)]


def of_runs(processes: Sequence[psutil.Process]) -> list[int]:
    """The ids of those that are stations or agents of a run, zombies left out."""
    alive = [own for own in processes if own.status() != psutil.STATUS_ZOMBIE]
    return [own.pid for own in alive if any(word.startswith("polyrhythm.runtime") for word in own.cmdline())]


@LONG
def test_a_run_on_three_nodes_crosses_tcp_and_survives_a_killed_station(three_nodes: Any, tmp_path: Path) -> None:
    changes = {**RAY, "ray": {"address": three_nodes.address, "strategy": "spread"}}
    pipeline = build_pipeline(
        RunContext(config(**changes, training={"versions": 500}), folder=tmp_path / "run"), record=True
    )
    try:
        pipeline.loop.train_until(version := 1)
        assert "tcp" in set.union(*ways(pipeline).values())
        killed = process_ids(pipeline.launcher.hosting)["simulator-0"]
        os.kill(killed, signal.SIGKILL)
        while version < VERSIONS or process_ids(pipeline.launcher.hosting).get("simulator-0", killed) == killed:
            pipeline.loop.train_until(version := version + 1)
        assert pipeline.weights.newest == version
        assert pipeline.loop.conductor.ledger.imbalance == 0
    finally:
        pipeline.close()
    assert not orphaned_folders()
    assert len(list((tmp_path / "run" / "logs").glob("*/*.log"))) == 6, "of each incarnation, in its host's folder"
    assert [list(folder.iterdir()) for folder in tmp_path.glob("memory-*")] == [[], [], []]
    assert not [process for process in children() if "polyrhythm" in " ".join(process.cmdline())]


def raylet_of(pid: int) -> int:
    """The process of the node that this process is on."""
    return next(process.pid for process in psutil.Process(pid).parents() if process.name() == "raylet")


@LONG
def test_a_lost_node_is_survived(three_nodes: Any, tmp_path: Path) -> None:
    """One with neither the trainer nor the head, while samples wait for the trainer."""
    changes = {**RAY, "ray": {"address": three_nodes.address, "strategy": "spread"}, "freshness": {"max_lag": 2}}
    pipeline = build_pipeline(
        RunContext(config(**changes, training={"versions": 500}), folder=tmp_path / "run"), record=True
    )
    try:
        pipeline.loop.train_until(1)
        raylets = {name: raylet_of(pid) for name, pid in process_ids(pipeline.launcher.hosting).items()}
        lost = next(
            node
            for node in three_nodes.worker_nodes
            if (pid := node.all_processes["raylet"][0].process.pid) in raylets.values() and pid != raylets["trainer"]
        )
        gone = lost.all_processes["raylet"][0].process.pid
        three_nodes.remove_node(lost, allow_graceful=False)
        pipeline.loop.train_until(6)
        # Training may be over before the loss is noticed: go on until its stations are elsewhere.
        until, version = time.monotonic() + PATIENCE_S / 2, 6
        while time.monotonic() < until and gone in places_of(pipeline, raylets):
            version += 1
            pipeline.loop.train_until(version)
        assert gone not in places_of(pipeline, raylets)
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.imbalance, ledger.dropped_total) == (0, 0)
    finally:
        pipeline.close()
    assert not orphaned_folders()


def worker_without_trainer(cluster: Any, pipeline: Pipeline) -> Any:
    """A node with stations that is neither the head nor the trainer's."""
    raylets = {name: raylet_of(pid) for name, pid in process_ids(pipeline.launcher.hosting).items()}
    return next(
        node
        for node in cluster.worker_nodes
        if (pid := node.all_processes["raylet"][0].process.pid) in raylets.values() and pid != raylets["trainer"]
    )


@LONG
def test_a_run_goes_on_with_less_and_uses_a_node_that_comes_within_30_s(three_nodes: Any, tmp_path: Path) -> None:
    """Three nodes of two CPUs, six stations: a lost node leaves no CPU free for the two that were on it."""
    settings = {"address": three_nodes.address, "strategy": "spread", "min_simulators": 1, "min_generators": 1}
    changes = {**RAY, "ray": settings, "freshness": {"max_lag": 2}, "training": {"versions": 100_000}}
    pipeline = build_pipeline(
        RunContext(config(**changes, rollout={"generators": 3}), folder=tmp_path / "run"), record=True
    )
    try:
        pipeline.loop.train_until(1)
        hosting: Any = pipeline.launcher.hosting
        directory = hosting._hosts
        three_nodes.remove_node(worker_without_trainer(three_nodes, pipeline), allow_graceful=False)
        version = train_until(pipeline, 2, lambda: bool(directory.waiting))
        version = train_until(pipeline, version + 3, lambda: len(working(pipeline)) == 6 - len(directory.waiting))
        assert directory.waiting, "nothing has come that has room"
        three_nodes.add_node(**node(tmp_path, "new"))
        came = time.monotonic()
        train_until(pipeline, version + 1, lambda: len(working(pipeline)) == 6)
        assert time.monotonic() - came < 30.0
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.imbalance, ledger.dropped_total) == (0, 0)
    finally:
        pipeline.close()
    assert not orphaned_folders()
    left = {folder.name for folder in tmp_path.glob("memory-*") if list(folder.iterdir())}
    assert left <= {"memory-one", "memory-two"}, "a node that is gone may keep what it had"
    assert len(left) <= 1


@LONG
def test_a_run_that_loses_the_trainers_node_is_resumed_without_it_or_on_a_new_one(
    two_nodes: Any, tmp_path: Path
) -> None:
    """First on the node that is left, then, as that is lost too, on a new one. Lockstep: had a sample been lost, or
    trained twice, the weights would be others than those of a run that loses nothing."""
    settings = {"address": two_nodes.address, "strategy": "spread", "cpus_per_station": 0.25}
    more = {"training": {"versions": 60}, "checkpoint": {"run_every_s": 0.1}, "supervision": {"heartbeat_s": 10.0}}
    losses = iter((3, 30))
    fails_at = next(losses)

    def lose(metrics: Mapping[str, Any]) -> None:
        nonlocal fails_at
        if 0 < fails_at <= metrics["step"]:
            fails_at = next(losses, -1)
            two_nodes.remove_node(node_of_trainer(two_nodes), allow_graceful=False)

    folder = tmp_path / "run"
    folder.mkdir()
    checked = validate_run(config(LOCKSTEP, **RAY, ray=settings, **more))
    with pytest.raises(HostLost, match=r"host host-1 is lost .*; start again with resume, without its nodes"):
        train(checked, folder, callbacks=Callbacks([lose]))
    again = validate_run(load_config(folder / CONFIG_FILE))
    with pytest.raises(HostLost, match=r"host host-3 is lost .*; start again with resume, without its nodes"):
        train(again, folder, callbacks=Callbacks([lose]))
    two_nodes.add_node(**node(tmp_path, "new"))
    summary = train(validate_run(load_config(folder / CONFIG_FILE)), folder)

    lost_with = [(f["station"], f["host"]) for f in summary["faults"] if f["reason"].endswith("which is lost")]
    assert [each for each in lost_with if each[0] == "trainer"] == [("trainer", "host-1"), ("trainer", "host-3")]
    assert {host for _, host in lost_with} == {"host-1", "host-3"}
    assert summary["hosts"]["host-4"]["stations"] == ["simulator-0", "generator-0", "trainer"]
    ledger = summary["ledger"]
    assert ledger["trained"] == 60 * 10
    assert not ledger["dropped"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "train/actor/policy_loss" in line] == list(range(60))

    (tmp_path / "inline").mkdir()
    alone = validate_run(config(LOCKSTEP, launcher="inline", training={"versions": 60}))
    train(alone, tmp_path / "inline")
    expected, found = (torch.load(run / "policy.pt", weights_only=True) for run in (tmp_path / "inline", folder))
    for name, tensor in expected["policy"].items():
        assert torch.equal(found["policy"][name], tensor), name
    assert not orphaned_folders()


def node_of_trainer(cluster: Any) -> Any:
    """The node that the trainer's process is on."""
    (raylet,) = {raylet_of(p.pid) for p in children() if p.cmdline()[-1:] == ["trainer"]}
    return next(node for node in cluster.worker_nodes if node.all_processes["raylet"][0].process.pid == raylet)


def working(pipeline: Pipeline) -> list[str]:
    """The stations that the conductor can tell something."""
    hosting = pipeline.launcher.hosting
    return [name for name in hosting.names if hosting.station(name).reachable]


def train_until(pipeline: Pipeline, version: int, condition: Callable[[], bool]) -> int:
    """Train at least to this version, and on until the condition holds; the version."""
    until = time.monotonic() + PATIENCE_S / 2
    while True:
        pipeline.loop.train_until(version)
        if condition():
            return version
        assert time.monotonic() < until
        version += 1


def places_of(pipeline: Pipeline, before: dict[str, int]) -> set[int]:
    """The nodes of the stations now; one whose process has ended, or is being started, is where it was."""
    found = set()
    for name, pid in process_ids(pipeline.launcher.hosting).items():
        try:
            found.add(raylet_of(pid))
        except (psutil.NoSuchProcess, StopIteration):
            found.add(before[name])
    return found


@LONG
def test_an_actor_that_cannot_start_its_process_says_why_in_the_log(ray: Any, tmp_path: Path) -> None:
    from polyrhythm.plugins.cluster.ray.actors import ActorProcess, Watcher

    class Unable:
        def __init__(self) -> None:
            raise OSError("no space left for logs")

        def pid(self) -> int:
            return 0

        def wait(self) -> int:
            return 0

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    watcher = Watcher()
    try:
        process = ActorProcess(ray.remote(Unable).remote(), tmp_path / "station.log")
        watcher.add(process)
        assert process.wait(timeout=60) == 1, "not as if it had been killed from outside, which may be repeated often"
        assert "no space left for logs" in (tmp_path / "station.log").read_text()
    finally:
        watcher.close()
        ray.shutdown()


@LONG
def test_a_killed_process_counts_as_ended_when_its_actor_says_so_or_its_host_is_lost(ray: Any, tmp_path: Path) -> None:
    """Or after so long that a busy machine is no reason; or if the watching thread fails."""
    from polyrhythm.plugins.cluster.ray.actors import ActorProcess, Watcher, last_line

    class Deaf:
        def pid(self) -> int:
            return 1

        def wait(self) -> None:
            time.sleep(3600)

        def kill(self) -> None: ...

        def read_log(self, offset: int, size: int) -> bytes:
            return b""

    class Faulty(ActorProcess):
        def look(self, now: float) -> bool:
            return bool("".splitlines()[-1])

    def started(kind: type[ActorProcess] = ActorProcess) -> ActorProcess:
        actor = ray.remote(Deaf).options(max_concurrency=4, num_cpus=0).remote()
        process = kind(actor, tmp_path / "station.log")
        wait_until(lambda: process.pid == 1)
        process.kill()
        return process

    ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=80 * 2**20)
    watcher = Watcher()
    try:
        waits, moves, faulty = started(), started(), started(Faulty)
        now = time.monotonic()
        assert not waits.look(now + 10.0)
        assert (waits.poll(), waits.abandoned) == (None, False)
        assert waits.look(now + 20.0)
        moves.host_lost = True
        assert moves.look(now)
        watcher.add(faulty)
        faulty.wait(timeout=60)
        assert all(process.abandoned and process.poll() == -signal.SIGKILL for process in (waits, moves, faulty))
    finally:
        watcher.close()
        ray.shutdown()
    assert last_line(ValueError()) == "ValueError"


@LONG
def test_a_cluster_that_is_too_small_is_refused_with_what_is_wanted_and_found(ray: Any, tmp_path: Path) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        with pytest.raises(StartError, match=r"5 CPUs are wanted for 5 stations, 2 are in the cluster \(2 on .*\)"):
            build_pipeline(RunContext(config(**RAY), folder=tmp_path / "run"))
    finally:
        ray.shutdown()
    assert not orphaned_folders()


def test_a_cluster_that_is_not_there_is_refused_at_once(ray: Any, tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"ray.address = 127.0.0.1:1: no cluster answers there"):
        build_pipeline(RunContext(config(**RAY, ray={"address": "127.0.0.1:1"}), folder=tmp_path / "run"))
    with pytest.raises(MissingError, match=r"ray.address = 127.0.0.1:1: no cluster answers there"):
        check_launcher(config(**RAY, ray={"address": "127.0.0.1:1"}))
    assert not children()


@LONG
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_trainer_of_two_ranks_on_a_cluster_gives_the_weights_of_one(ray: Any, strategy: str, tmp_path: Path) -> None:
    found = {}
    for name, changes in (("inline", {}), ("ray", {"placement": {"trainer": {"ranks": 2, "strategy": strategy}}})):
        (tmp_path / name).mkdir()
        with running(tmp_path / name, base=SEVERAL_STEPS, launcher=name, **changes) as pipeline:
            pipeline.loop.train_until(VERSIONS)
            check_complete(pipeline)
            found[name] = pipeline.weights.read()[1]
    for name, tensor in found["inline"].items():
        torch.testing.assert_close(found["ray"][name], tensor, rtol=0.0, atol=1e-4, msg=name)
    logs = {path.name for path in (tmp_path / "ray" / "logs").glob("trainer*")}
    assert logs == {"trainer.0.log", "trainer-rank1.0.log"}


@LONG
def test_a_killed_rank_on_a_cluster_is_one_loss_of_the_trainer(ray: Any, tmp_path: Path) -> None:
    placement = {"trainer": {"ranks": 2, "strategy": "shard"}}
    with running(tmp_path / "run", base=SEVERAL_STEPS, launcher="ray", placement=placement) as pipeline:
        pipeline.loop.train_until(1)
        os.kill(process_ids(pipeline.launcher.hosting)["trainer-rank1"], signal.SIGKILL)
        pipeline.loop.train_until(VERSIONS)
        reasons = [event.reason for event in lost(pipeline) if event.station == "trainer"]
        assert reasons == ["rank 1: was ended by SIGKILL"]
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.imbalance, pipeline.weights.newest) == (0, VERSIONS)
