"""A trainer whose ranks are on several hosts: real processes that connect over tcp, in memories of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.plugins.cluster.process.test_hosts import AGENT, running
from tests.plugins.cluster.process.test_ray import cluster_of, raylet_of
from tests.plugins.ranks.test_runs import ONE
from tests.process.networks import apart_by_setting, memory
from tests.process.runs import ASYNCHRONOUS, children, config, orphaned_folders
from tests.process.test_supervision import lost

from polyrhythm.config.load import merge
from polyrhythm.errors import RunHalted, StartError
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.plugins.cluster.hosts.agent import LocalNode
from polyrhythm.plugins.cluster.launching import launch_on
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler.records import DropReason

#: Stations: a simulator, a generator, a trainer.
SMALL = merge(ASYNCHRONOUS, {"rollout": {"simulators": 1, "generators": 1}, "training": {"versions": 1000}})


def ranked(count: int, strategy: str = "replicate", base: dict[str, Any] = ONE, **changes: Any) -> dict[str, Any]:
    return merge(base, {"placement": {"trainer": {"ranks": count, "strategy": strategy}}, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("replicate", marks=long(12, "replicas on several hosts")), "shard"])
@long(20, "four ranks on three hosts")
def test_four_ranks_on_three_hosts_give_the_weights_of_one(strategy: str, tmp_path: Path) -> None:
    """Ranks 0 and 3 are on the first host, with the simulator."""
    found = []
    one, two, three = apart_by_setting(tmp_path, 3)
    for name, count, nodes in (("one", 1, ()), ("four", 4, [one, two, one, two, three, one])):
        settings = ranked(count, strategy, launcher="local" if nodes else "inline")
        (tmp_path / name).mkdir()
        with running(tmp_path / name, nodes, settings) as pipeline:
            pipeline.loop.train_until(10)
            found.append(pipeline.weights.read()[1])
    weights, expected = found[1], found[0]
    assert max(float((weights[name] - x).abs().max()) for name, x in expected.items()) <= 1e-4
    assert all(torch.isfinite(x).all() for x in weights.values())


def hosts_of(folder: Path, incarnation: int) -> dict[str, str]:
    """The host of each rank of an incarnation of the trainer, by the folder of its log."""
    logs = (folder / "logs").glob(f"*/trainer*.{incarnation}.log")
    return {file.name.removesuffix(f".{incarnation}.log"): file.parent.name for file in logs}


def nothing_lost(pipeline: Pipeline) -> None:
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, set(ledger.dropped) - {DropReason.ROLLBACK}) == (0, set())


@long(20, "four ranks on three hosts, twice lost")
def test_a_killed_rank_and_a_lost_host_are_losses_of_the_trainer(tmp_path: Path) -> None:
    """Each time all ranks start again: on their hosts, then the one whose host is lost on another."""
    one, two, three = apart_by_setting(tmp_path, 3)
    base = ranked(3, base=SMALL, supervision={"heartbeat_s": 6.0})
    with running(tmp_path / "run", [one, one, one, two, three], base) as pipeline:
        pipeline.loop.train_until(2)
        own = process_ids(pipeline.launcher.hosting)
        os.kill(own["trainer-rank1"], signal.SIGKILL)
        pipeline.loop.train_until(5)
        own = process_ids(pipeline.launcher.hosting)
        (agent,) = [process.pid for process in children() if process.cmdline()[-2:] == [AGENT, "host-3"]]
        for pid in (agent, own["trainer-rank2"]):
            os.kill(pid, signal.SIGKILL)
        pipeline.loop.train_until(8)
        reasons = [event.reason for event in lost(pipeline) if event.station == "trainer"]
        nothing_lost(pipeline)
    assert reasons == ["rank 1: was ended by SIGKILL", "rank 2: was ended by SIGKILL"]
    first, second, third = (hosts_of(tmp_path / "run", incarnation) for incarnation in range(3))
    assert first == second == {"trainer": "host-1", "trainer-rank1": "host-2", "trainer-rank2": "host-3"}
    assert (third["trainer"], third["trainer-rank1"]) == ("host-1", "host-2")
    assert third["trainer-rank2"] in ("host-1", "host-2")


@pytest.mark.slow
@long(12, "a rank of another host that is stopped")
def test_a_stopped_rank_of_another_host_is_one_loss_of_the_trainer(tmp_path: Path) -> None:
    one, two = apart_by_setting(tmp_path, 2)
    base = ranked(4, "shard", SMALL, supervision={"heartbeat_s": 5.0})
    with running(tmp_path / "run", [one, one, one, two, one, two], base) as pipeline:
        pipeline.loop.train_until(2)
        os.kill(process_ids(pipeline.launcher.hosting)["trainer-rank3"], signal.SIGSTOP)
        pipeline.loop.train_until(5)
        reasons = [event.reason for event in lost(pipeline) if event.station == "trainer"]
        nothing_lost(pipeline)
    assert reasons == ["rank 3: sent no heartbeat for 5 s (supervision.heartbeat_s)"]


def refused(
    folder: Path, two: LocalNode, error: type[Exception], match: str, at: Sequence[int] = (1, 1, 1, 2), **changes: Any
) -> None:
    """A run does not start. at: the nodes of the simulator, the generator and two ranks; `two` is the second."""
    (one,) = apart_by_setting(folder / "one", 1)
    settings = config(ranked(2, base=SMALL, **changes))
    launch = launch_on([two if node == 2 else one for node in at])
    with pytest.raises(error, match=match):
        build_pipeline(RunContext(settings, folder=folder / "run", launch=launch))
    assert not children()
    assert not orphaned_folders()


#: Begins a rank 1 late.
LATE = ("/bin/sh", "-c", 'case "$*" in *trainer-rank1) sleep 60;; esac; exec "$@"', "sh")


@pytest.mark.slow
@long(8, "ranks of which one does not come, which takes 20 s")
def test_ranks_that_do_not_all_come_end_the_run_with_one_error_that_says_which(tmp_path: Path) -> None:
    refused(
        tmp_path,
        LocalNode("late", prefix=LATE, environment=memory(tmp_path, "late")),
        RunHalted,
        r"^trainer: rank 0: of 2 ranks only 0 \(host-1\) came in time \(supervision\.start_s\), not 1 \(host-2\); "
        r"its log says how far it got; if it runs, each rank's host has to reach 127\.0\.0\.1:\d+, .* a firewall",
        supervision={"start_s": 24.0},
    )


@long(8, "ranks that cannot connect")
def test_ranks_that_cannot_connect_end_the_run_with_one_error_that_names_the_interface(tmp_path: Path) -> None:
    refused(
        tmp_path,
        LocalNode("b", environment=memory(tmp_path, "b") | {"GLOO_SOCKET_IFNAME": "nowhere"}),
        RunHalted,
        r"^trainer: rank 1: it has met the other ranks but cannot connect to all of them from host-2 "
        r"\(.*nowhere.*\); .*GLOO_SOCKET_IFNAME",
        supervision={"start_s": 40.0},
    )


@pytest.mark.parametrize("at", [(1, 1, 1, 2), (2, 1, 1, 1)], ids=["with a rank", "where a rank may go"])
def test_a_node_that_does_not_see_the_runs_folder_is_refused(at: Sequence[int], tmp_path: Path) -> None:
    """Before anything starts; in a mount namespace where an empty folder lies over the run's."""
    run = tmp_path / "run"
    run.mkdir()
    words = ("unshare", "--mount", "/bin/sh", "-c", f'mount -t tmpfs none {run} && exec "$@"', "sh")
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine forbids mounts")
    far = LocalNode("far", prefix=words, environment=memory(tmp_path, "far"))
    said = rf"far: the run's folder {run}/run cannot be seen there, where the trainer's ranks save"
    refused(run, far, StartError, said, at)


@pytest.fixture
def ray_nodes(tmp_path: Path) -> Iterator[Any]:
    """A head of three CPUs and two nodes of two, each with a memory of its own."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    yield from cluster_of(tmp_path, {"num_cpus": 3}, one={"num_cpus": 2}, two={"num_cpus": 2})


@pytest.mark.slow
@long(40, "with a Ray of its own")
def test_ranks_spread_over_a_ray_cluster_and_one_node_of_it_may_be_lost(ray_nodes: Any, tmp_path: Path) -> None:
    """Six processes of a CPU each on nodes of seven CPUs: rank 0 is where the run is, so only that node is needed. Its
    memory is not main's here."""
    settings = {"address": ray_nodes.address, "strategy": "spread"}
    base = ranked(4, "shard", SMALL, launcher="ray", ray=settings, supervision={"heartbeat_s": 6.0})
    pipeline = build_pipeline(RunContext(config(base), folder=tmp_path / "run"), record=True)
    try:
        pipeline.loop.train_until(2)
        hosts = hosts_of(tmp_path / "run", 0)
        assert len(set(hosts.values())) == 3
        raylets = {name: raylet_of(pid) for name, pid in process_ids(pipeline.launcher.hosting).items()}
        assert raylets["trainer"] == ray_nodes.head_node.all_processes["raylet"][0].process.pid
        far = next(name for name, host in hosts.items() if host != hosts["trainer"])
        node = next(n for n in ray_nodes.worker_nodes if n.all_processes["raylet"][0].process.pid == raylets[far])
        ray_nodes.remove_node(node, allow_graceful=False)
        version = 3
        while not hosts_of(tmp_path / "run", 1):
            pipeline.loop.train_until(version)
            version += 1
        pipeline.loop.train_until(version + 2)
        after = hosts_of(tmp_path / "run", 1)
        assert after["trainer"] == hosts["trainer"]
        assert hosts[far] not in after.values()
        nothing_lost(pipeline)
    finally:
        pipeline.close()
    assert not orphaned_folders()
