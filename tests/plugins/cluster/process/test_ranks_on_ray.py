"""Trainer ranks and generators on the devices of three Ray nodes: the weights of one rank, with a node lost too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.cluster.process.test_ray import node, raylet_of
from tests.plugins.cluster.process.test_ray_devices import NODE, on, three_nodes
from tests.plugins.ranks.test_runs import ONE
from tests.process.runs import ASYNCHRONOUS, config
from tests.process.test_supervision import lost

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.runtime.hosting import process_ids

__all__ = ["three_nodes"]  # a fixture

UPDATES = 10
BASE = merge(ONE, {"rollout": {"generators": 2}, "training": {"versions": UPDATES}})


def built(folder: Path, base: dict[str, Any] = ASYNCHRONOUS, **changes: Any) -> closing[Pipeline]:
    """A run beside a cluster that goes on after it."""
    folder.mkdir()
    return closing(build_pipeline(RunContext(config(base, **changes), folder=folder), record=True))


def lose_a_rank_and_a_generator(cluster: Any, pipeline: Pipeline) -> None:
    """Lose the node that has both, but not rank 0."""
    there: dict[int, set[str]] = {}
    for name, pid in process_ids(pipeline.launcher.hosting).items():
        there.setdefault(raylet_of(pid), set()).add(name)
    (chosen,) = [raylet for raylet, names in there.items() if {"trainer-rank1", "generator-1"} <= names]
    (gone,) = [one for one in cluster.worker_nodes if one.all_processes["raylet"][0].process.pid == chosen]
    cluster.remove_node(gone, allow_graceful=False)


@long(60, "four ranks on the devices of three Ray nodes")
@pytest.mark.parametrize(("strategy", "loses"), [("replicate", False), ("shard", False), ("replicate", True)])
def test_ranks_on_devices_of_three_nodes_give_the_weights_of_one(
    strategy: str, loses: bool, three_nodes: Any, tmp_path: Path
) -> None:
    """A node with rank 1 and a generator is lost after three updates, and another one comes."""
    with built(tmp_path / "one", base=BASE, launcher="inline") as pipeline:
        pipeline.loop.train_until(UPDATES)
        expected = pipeline.weights.read()[1]
    placement = {
        "simulated_devices": 2,
        "generators": {"devices": "1,3"},
        "trainer": {"devices": "0,2,4,5", "strategy": strategy},
    }
    changes = {"launcher": "ray", "ray": on(three_nodes), "placement": placement, "supervision": {"heartbeat_s": 8.0}}
    with built(tmp_path / "four", base=BASE, **changes) as pipeline:
        pipeline.loop.train_until(3)
        if loses:
            lose_a_rank_and_a_generator(three_nodes, pipeline)
            three_nodes.add_node(**{**node(tmp_path, "new"), **NODE})
        pipeline.loop.train_until(UPDATES)
        weights, ledger = pipeline.weights.read()[1], pipeline.loop.conductor.ledger
        assert ("trainer" in [event.station for event in lost(pipeline)]) is loses
        assert (ledger.imbalance, ledger.dropped_total, ledger.trained) == (0, 0, 10 * UPDATES)
    differences = [float((weights[name] - x).abs().max()) for name, x in expected.items()]
    assert all(difference <= 1e-4 for difference in differences), "NaN is not less"
