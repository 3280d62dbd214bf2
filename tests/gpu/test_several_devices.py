"""Whole runs on several CUDA devices of a machine, on one host and as two Ray nodes with half of them each: ranks over
NCCL, shards within nodes, weights from device to device, leases on both nodes.

Never run so far, as no machine with two CUDA devices was at hand (docs/never-run.md): the same runs on simulated
devices are in tests/process and tests/plugins/cluster/process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugins.cluster.process.test_hosts import VERSIONS, check_complete, ways
from tests.plugins.cluster.process.test_ranks_on_ray import built
from tests.plugins.cluster.process.test_ray import cluster_of, node
from tests.plugins.cluster.process.test_ray_devices import on
from tests.plugins.lease.process.test_lease import holders
from tests.plugins.ranks.test_runs import ONE
from tests.process import test_weights_on_devices

from polyrhythm.runtime.memory.device_weights import can_reach

pytestmark = pytest.mark.gpu


@pytest.fixture
def count(request: pytest.FixtureRequest, cuda: torch.device) -> int:
    """Devices that the test takes, two unless it says otherwise; skips where there are fewer."""
    wanted, found = getattr(request, "param", 2), torch.cuda.device_count()
    if found < wanted:
        pytest.skip(f"needs {wanted} CUDA devices, this machine has {found}")
    return int(wanted)


@pytest.fixture
def two_nodes(count: int, tmp_path: Path) -> Iterator[Any]:
    """Each sees its half of the devices alone, and has a memory of its own; no station has room on the head."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    half = count // 2
    with contextmanager(cluster_of)(tmp_path, {"num_cpus": 0, "num_gpus": 0}) as cluster:
        for number, name in enumerate(("one", "two")):
            own = node(tmp_path, name)
            seen = ",".join(str(half * number + index) for index in range(half))
            variables = {**own["env_vars"], "CUDA_VISIBLE_DEVICES": seen}
            cluster.add_node(**{**own, "env_vars": variables, "num_cpus": 8, "num_gpus": half})
        yield cluster


def test_generators_take_weights_from_the_trainers_device_and_from_another(count: int, tmp_path: Path) -> None:
    if not can_reach("cuda:1", "cuda:0"):
        pytest.skip("the second CUDA device cannot read the first one's memory")
    placement = {**test_weights_on_devices.DEVICES, "simulated_devices": 0}
    _, found, _ = test_weights_on_devices.run(tmp_path / "run", placement)
    assert found == {"generator-0": {"ipc"}, "generator-1": {"peer"}}


@pytest.mark.parametrize("count", [2, 4], indirect=True)
@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_ranks_of_two_nodes_give_the_weights_of_one(strategy: str, count: int, two_nodes: Any, tmp_path: Path) -> None:
    """With four devices the shards are within each node (HSDP)."""
    found = []
    for name, changes in (
        ("one", {"placement": {"generators": {"devices": "0"}, "trainer": {"devices": "0"}}}),
        (
            "ranks",
            {
                "launcher": "ray",
                "ray": on(two_nodes),
                "placement": {"generators": {"devices": "0"}, "trainer": {"devices": "all", "strategy": strategy}},
            },
        ),
    ):
        with built(tmp_path / name, base=ONE, **changes) as pipeline:
            pipeline.loop.train_until(VERSIONS)
            check_complete(pipeline)
            found.append(pipeline.weights.read()[1])
    one, ranks = found
    assert max(float((ranks[name] - x).abs().max()) for name, x in one.items()) <= 1e-4
    assert len([*(tmp_path / "ranks" / "logs").rglob("trainer*.log")]) == count


def test_weights_go_to_a_device_of_another_node(two_nodes: Any, tmp_path: Path) -> None:
    placement = {"generators": {"devices": "0-1"}, "trainer": {"devices": "0"}}
    with built(tmp_path / "run", launcher="ray", ray=on(two_nodes), placement=placement) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        found = ways(pipeline)
    assert found["generator-0"] <= {"ipc", "host"}
    assert "pair" in found["generator-1"]


def test_stations_take_turns_on_the_device_of_each_node(two_nodes: Any, tmp_path: Path) -> None:
    """A generator and a rank on each."""
    placement = {"sharing": "lease", "preset": "colocated", "lease": {"min_hold_s": 0.05}}
    with built(tmp_path / "run", launcher="ray", ray=on(two_nodes), placement=placement) as pipeline:
        pipeline.loop.train_until(VERSIONS)
        check_complete(pipeline)
        assert [{*holders(pipeline, device)} for device in (0, 1)] == [
            {"generator-0", "trainer"},
            {"generator-1", "trainer"},
        ]
