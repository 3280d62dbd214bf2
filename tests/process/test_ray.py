"""Runs on a Ray cluster: one of this machine's own, and three nodes that are hosts of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.networks import memory
from tests.process.runs import children, config, orphaned_folders
from tests.process.test_hosts import VERSIONS, check_complete, running, ways

from polyrhythm.errors import ConfigError, StartError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.validation.launcher_checks import check_launcher

RAY: dict[str, Any] = {"launcher": "ray"}


@pytest.fixture(scope="module")
def ray() -> Any:
    return pytest.importorskip("ray", reason="the ray extra is not installed")


@pytest.fixture
def three_nodes(ray: Any, tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of three nodes, each of which has a memory of its own."""
    from ray.cluster_utils import Cluster

    def node(name: str) -> dict[str, Any]:
        return {"num_cpus": 2, "env_vars": memory(tmp_path, name), "object_store_memory": 80 * 2**20}

    cluster = Cluster(initialize_head=True, head_node_args=node("head") | {"include_dashboard": False})
    try:
        cluster.add_node(**node("one"))
        cluster.add_node(**node("two"))
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_run_on_a_cluster_of_its_own_is_complete_and_leaves_nothing(ray: Any, tmp_path: Path) -> None:
    with running(tmp_path / "run", **RAY) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        assert ways(pipeline) == {"generator-0": {"host"}, "generator-1": {"host"}}
    assert not ray.is_initialized()
    assert len(list((tmp_path / "run" / "logs").glob("*.log"))) == 5


@pytest.mark.slow
def test_a_run_on_three_nodes_crosses_tcp_and_survives_a_killed_station(three_nodes: str, tmp_path: Path) -> None:
    changes = {**RAY, "ray": {"address": three_nodes, "strategy": "spread"}}
    pipeline = build_pipeline(config(**changes), folder=tmp_path / "run", record=True)
    try:
        pipeline.loop.train_until(1)
        assert "tcp" in set.union(*ways(pipeline).values())
        os.kill(pipeline.launcher.processes()["simulator-0"], signal.SIGKILL)
        pipeline.loop.train_until(VERSIONS)
        assert pipeline.weights.newest == VERSIONS
        assert pipeline.loop.conductor.ledger.imbalance == 0
    finally:
        pipeline.close()
    assert not orphaned_folders()
    assert [list(folder.iterdir()) for folder in tmp_path.glob("memory-*")] == [[], [], []]
    assert not [process for process in children() if "polyrhythm" in " ".join(process.cmdline())]


@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_refused_with_what_is_wanted_and_found(ray: Any, tmp_path: Path) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        with pytest.raises(StartError, match=r"5 CPUs are wanted for 5 stations, 2 are in the cluster \(2 on .*\)"):
            build_pipeline(config(**RAY), folder=tmp_path / "run")
    finally:
        ray.shutdown()
    assert not orphaned_folders()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str, ray: Any, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=rf"ray.address = {address}: (not an address|no cluster answers there)"):
        build_pipeline(config(**RAY, ray={"address": address}), folder=tmp_path / "run")
    assert not children()


def test_devices_are_refused_for_all_kinds_at_once() -> None:
    placement = {"generators": {"devices": "0"}, "trainer": {"devices": "all"}}
    with pytest.raises(ConfigError, match=r"(?s)placement.generators.devices = 0: .*placement.trainer.devices = all: "):
        check_launcher(config(**RAY, placement=placement))
