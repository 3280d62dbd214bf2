"""Devices of several nodes: Ray nodes with fake GPUs (`num_gpus` on CPUs), whose memory is a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.cluster.process.test_ray import cluster_of
from tests.process.runs import ASYNCHRONOUS, config, orphaned_folders

from polyrhythm.pipeline.placed import place
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run

LONG = long(30, "with a Ray of its own")
#: Four devices: the trainer has the last one, a generator is on each other one.
SPREAD = {
    "launcher": "ray",
    "placement": {"preset": "disaggregated", "simulated_devices": 2},
    "rollout": {"simulators": 3, "generators": 3},
}


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Any]:
    """Two nodes of two fake GPUs, beside a head that has none."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    yield from cluster_of(
        tmp_path, head={"num_cpus": 1}, one={"num_cpus": 4, "num_gpus": 2}, two={"num_cpus": 4, "num_gpus": 2}
    )


@LONG
def test_a_preset_over_two_nodes_trains_on_the_devices_of_both(two_nodes: Any, tmp_path: Path) -> None:
    settings = {"address": two_nodes.address, "cpus_per_station": 0.5}
    own = config(ASYNCHRONOUS, **SPREAD, ray=settings, training={"versions": 3})
    checked = validate_run(own)
    seats = place(checked.config).seats
    devices = {name: seat.device for name, seat in seats.items()}
    assert devices["trainer"] == "sim:3"
    assert [devices[f"generator-{i}"] for i in range(3)] == ["sim:0", "sim:1", "sim:2"]
    nodes = {seat.device: seat.node for seat in seats.values()}
    assert nodes["sim:0"] == nodes["sim:1"] != nodes["sim:2"] == nodes["sim:3"]
    folder = tmp_path / "run"
    folder.mkdir()
    summary = train(checked, folder)
    assert (summary["faults"], summary["ledger"]["dropped"]) == ([], {})
    hosts = {name: host for host, found in summary["hosts"].items() for name in found["stations"]}
    assert hosts["generator-0"] == hosts["generator-1"] != hosts["generator-2"] == hosts["trainer"]
    assert not orphaned_folders()
