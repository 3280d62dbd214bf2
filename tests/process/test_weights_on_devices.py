"""Whole runs whose generators take weights out of the trainer's memory on simulated devices, on its own (ipc) and from
another (peer), while the trainer is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from tests.process.runs import LOCKSTEP, closed, config, wait_until

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.memory.published import APPLY, read_traffic
from polyrhythm.scheduler.records import StationLost

VERSIONS = 5
#: Each generator has the requests of one simulator.
BASE = merge(LOCKSTEP, {"rollout": {"simulators": 2, "env_batches": 1, "rows": 5, "generators": 2}})
DEVICES: dict[str, Any] = {
    "simulated_devices": 2,
    "trainer": {"devices": "0", "threads": 1},
    "generators": {"devices": "0,1", "threads": 1},
}


def run(folder: Path, placement: dict[str, Any], *, killed: bool = False) -> tuple[Pipeline, dict[str, Any], Any]:
    """A lock-step run; the pipeline, closed, ways by generator, and the last weights."""
    folder.mkdir()
    with closed(build_pipeline(RunContext(config(BASE, placement=placement), folder=folder), record=True)) as pipeline:
        pipeline.loop.train_until(2)
        if killed:
            os.kill(process_ids(pipeline.launcher.hosting)["trainer"], signal.SIGKILL)
        pipeline.loop.train_until(VERSIONS)
        wait_until(lambda: pipeline.weights.newest == VERSIONS)
        counters = pipeline.launcher.hosting.statistics(fresh=True)
        ways = {name: {*read_traffic(counters[name])} - {APPLY} for name in ("generator-0", "generator-1")}
        _, weights = pipeline.weights.read(VERSIONS)
    return pipeline, ways, weights


def test_generators_take_versions_from_simulated_devices_though_the_trainer_is_killed(tmp_path: Path) -> None:
    _, ways, plain = run(tmp_path / "host", {})
    assert ways == {"generator-0": {"host"}, "generator-1": {"host"}}
    pipeline, ways, weights = run(tmp_path / "devices", DEVICES, killed=True)
    assert "ipc" in ways["generator-0"] <= {"ipc", "host"}
    assert "peer" in ways["generator-1"] <= {"peer", "host"}
    assert [d.event.station for d in pipeline.loop.trace if isinstance(d.event, StationLost)] == ["trainer"]
    assert plain.keys() == weights.keys()
    assert all(torch.equal(plain[name], tensor) for name, tensor in weights.items()), "a way changes no bytes"
    for name in ways:
        (log,) = (tmp_path / "devices" / "logs").glob(f"{name}*.log")
        said = log.read_text()
        opened = "weights come from the trainer's memory on sim:0 (a file of the run, as the device is simulated)"
        assert said.count(opened) == 2, "the memory of each of the two trainers"
        assert "CUDA" not in said
