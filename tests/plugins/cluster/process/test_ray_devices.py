"""Devices of several nodes: Ray nodes with fake GPUs (`num_gpus` on CPUs), whose memory is a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.long import long
from tests.plugins.cluster.process.test_hosts import VERSIONS, check_complete, running
from tests.plugins.cluster.process.test_ray import (
    cluster_of,
    node,
    places_of,
    raylet_of,
    train_until,
    worker_without_trainer,
)
from tests.plugins.lease.process.test_lease import holders
from tests.process.runs import ASYNCHRONOUS, config, orphaned_folders

from polyrhythm.cli.main import main
from polyrhythm.config.sections.running import RaySettings
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.placed import place
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.cluster.description import read_description
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.memory.published import Ends

LONG = long(30, "with a Ray of its own")
NODE = {"num_cpus": 4, "num_gpus": 2}
#: Four devices: the trainer has the last one, a simulator and a generator are on each other one.
SPREAD: dict[str, Any] = {
    "launcher": "ray",
    "placement": {"preset": "disaggregated", "simulated_devices": 2},
    "rollout": {"simulators": 3, "generators": 3},
}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Any]:
    """Two nodes of two fake GPUs, beside a head that has none."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    yield from cluster_of(tmp_path, {"num_cpus": 1}, one=NODE, two=NODE)


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[Any]:
    pytest.importorskip("ray", reason="the ray extra is not installed")
    yield from cluster_of(tmp_path, {"num_cpus": 1}, one=NODE, two=NODE, three=NODE)


def on(cluster: Any, **more: Any) -> dict[str, Any]:
    return {"address": cluster.address, "cpus_per_station": 0.5, **more}


@LONG
def test_a_preset_over_two_nodes_trains_on_the_devices_of_both(
    two_nodes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", two_nodes.address]) == 0
    (file := tmp_path / "cluster.yaml").write_text(capsys.readouterr().out)
    described = read_description(str(file))
    assert [(own.cpus, own.gpus) for own in described.nodes] == [(1.0, 0), (4.0, 2), (4.0, 2)]

    checked = validate_run(config(ASYNCHRONOUS, **SPREAD, ray=on(two_nodes), training={"versions": 3}))
    seats = place(checked.config).seats
    devices = {name: seat.device for name, seat in seats.items()}
    assert devices["trainer"] == "sim:3"
    assert [devices[f"generator-{i}"] for i in range(3)] == ["sim:0", "sim:1", "sim:2"]
    nodes = {seat.device: seat.node for seat in seats.values()}
    assert nodes["sim:0"] == nodes["sim:1"] != nodes["sim:2"] == nodes["sim:3"]
    assert [own.name for own in described.nodes if own.gpus] == [nodes["sim:0"], nodes["sim:2"]]
    folder = tmp_path / "run"
    folder.mkdir()
    summary = train(checked, folder)
    assert (summary["faults"], summary["ledger"]["dropped"]) == ([], {})
    hosts = {name: host for host, found in summary["hosts"].items() for name in found["stations"]}
    assert hosts["generator-0"] == hosts["generator-1"] != hosts["generator-2"] == hosts["trainer"]
    assert not orphaned_folders()


@LONG
def test_stations_of_a_device_take_turns_on_each_of_two_nodes(two_nodes: Any, tmp_path: Path) -> None:
    """The trainer and a generator on the last device, generators on the first two; each lease is of its node."""
    placement = {
        "sharing": "lease",
        "simulated_devices": 2,
        "generators": {"devices": "0-3"},
        "trainer": {"devices": "3"},
        "lease": {"min_hold_s": 0.01},
    }
    rollout = {"simulators": 2, "generators": 5}
    own = config(ASYNCHRONOUS, launcher="ray", placement=placement, rollout=rollout, ray=on(two_nodes))
    checked = validate_run(own)
    seats = place(checked.config).seats
    assert {name: seat.leases for name, seat in seats.items() if seat.leases} == {
        "generator-0": (0,),
        "generator-4": (0,),
        "generator-3": (3,),
        "trainer": (3,),
    }
    assert seats["generator-0"].node != seats["trainer"].node
    pipeline = build_pipeline(RunContext(checked.config, folder=tmp_path / "run"), record=True)
    try:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        assert {"generator-0", "generator-4"} == {*holders(pipeline, 0)}
        assert {"generator-3", "trainer"} == {*holders(pipeline, 3)}
    finally:
        pipeline.close()
    assert not orphaned_folders()


@LONG
def test_a_seat_has_the_numbers_of_the_devices_that_its_node_gives(tmp_path: Path) -> None:
    """The node may use GPUs 5 and 7, and somebody else has 5: the run's first device is torch's second one there."""
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    from polyrhythm.plugins.cluster.ray.bundles import Bundles

    with contextmanager(cluster_of)(tmp_path, {"num_cpus": 1}) as cluster:
        own_node = node(tmp_path, "two")
        own_node["env_vars"]["CUDA_VISIBLE_DEVICES"] = "5,7"
        cluster.add_node(**{**own_node, **NODE})
        ray.init(address=cluster.address, log_to_driver=False)
        others = ray.util.placement_group([{"GPU": 1}])
        assert others.wait(60)
        (id_,) = (found["NodeID"] for found in ray.nodes() if found["Resources"].get("GPU"))
        bound = Resources("cuda:0", environment={"CUDA_VISIBLE_DEVICES": "0"}, node="two")
        trains = Resources("cuda:0", node="two", ends=Ends("cuda:0", ("cuda:0", "cuda:9")))
        seats = {"s": bound, "trainer": trains, "g": Resources()}
        bundles = Bundles(RaySettings(cpus_per_station=0.5), seats, {"two": id_})
        bundles.reserve()
        assert bundles.wait(60)
        bundles.find_devices()
        assert bool(bundles.without_cuda()) == metadata.version("torch").endswith("+cpu")
        own = bundles.seat_on(bound, id_)
        assert own.local == own.torch_device == "cuda:1"
        assert own.environment == {"CUDA_VISIBLE_DEVICES": "7", "MUJOCO_EGL_DEVICE_ID": "7"}
        there = bundles.seat_on(trains, id_)
        assert (there.local, there.environment) == ("cuda:1", {})
        assert there.ends is not None
        assert there.ends.local == {"cuda:0": "cuda:1"}
        moved = Bundles(RaySettings(), {"g": replace(trains, node="a")}, {"a": "lost"}).seat_on(trains, id_)
        assert moved.ends is not None
        assert moved.ends.host_only, "the trainer keeps nothing for a device that is new there"
        shares = bundles.seat_on(Resources("cuda:4"), id_)
        assert shares.local == "cuda:1", "the only one that the run has there"
        alive = {found["NodeID"] for found in ray.nodes()}
        assert bundles.look(alive) == {"g": bundles.look(alive)["g"], "s": id_, "trainer": id_}
        assert bundles.nodes_with_devices() == {id_}
        bundles.close()
        ray.shutdown()


@LONG
def test_a_lost_nodes_stations_go_to_free_devices_and_back_to_a_node_that_comes(
    three_nodes: Any, tmp_path: Path
) -> None:
    """Six devices for four stations: those of a lost node go to devices that nobody has, on the nodes that are left; if
    another one is lost they share."""
    placement = {"generators": {"devices": "0-4"}, "trainer": {"devices": "5"}, "simulated_devices": 2}
    changes: dict[str, Any] = {"freshness": {"max_lag": 2}, "training": {"versions": 100_000}}
    changes |= {"rollout": {"generators": 5}, "supervision": {"heartbeat_s": 10.0}}
    own = config(ASYNCHRONOUS, launcher="ray", placement=placement, ray=on(three_nodes), **changes)
    pipeline = build_pipeline(RunContext(validate_run(own).config, folder=tmp_path / "run"), record=True)
    try:
        train_until(pipeline, 1, lambda: all(process_ids(pipeline.launcher.hosting).values()))
        raylets = {name: raylet_of(pid) for name, pid in process_ids(pipeline.launcher.hosting).items()}
        lost = worker_without_trainer(three_nodes, pipeline)
        gone = lost.all_processes["raylet"][0].process.pid
        moved = [name for name, raylet in raylets.items() if raylet == gone and name.startswith("generator")]
        assert len(moved) == 2
        three_nodes.remove_node(lost, allow_graceful=False)
        version = train_until(pipeline, 2, lambda: gone not in places_of(pipeline, raylets))
        added = three_nodes.add_node(**{**node(tmp_path, "new"), **NODE})
        new = added.all_processes["raylet"][0].process.pid

        def came() -> bool:
            now = process_ids(pipeline.launcher.hosting)
            with suppress(psutil.NoSuchProcess, StopIteration):  # it is being started
                return all(raylet_of(now[name]) == new for name in moved)
            return False

        train_until(pipeline, version + 1, came)
        ledger = pipeline.loop.conductor.ledger
        assert (ledger.imbalance, ledger.dropped_total) == (0, 0)
    finally:
        pipeline.close()
    assert not orphaned_folders()


@LONG
def test_a_ray_of_its_own_has_the_devices_that_are_simulated(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="the ray extra is not installed")
    placement = {"preset": "hybrid", "simulated_devices": 4, "trainer": {"devices": "3"}}
    with running(tmp_path / "run", launcher="ray", placement=placement, ray={"cpus_per_station": 0.5}) as pipeline:
        pipeline.loop.train_until(2)
        assert ray.cluster_resources()["GPU"] == 4.0
    assert not ray.is_initialized()
