"""Whole runs whose generators read observations in the memory of a simulator on the same (simulated) device."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, PATIENCE_S, closed, config

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler.records import DeviceYielded, StationLost

VERSIONS = 3
TENSORS = {"type": "tests.process.tensor_env:TensorSettings", "id": "CartPole-v1", "max_steps": 40}
LEAVING = {**TENSORS, "type": "tests.process.tensor_env:LeavingTensorSettings"}
#: Each generator has the requests of one simulator.
BASE = merge(LOCKSTEP, {"env": TENSORS, "rollout": {"simulators": 2, "env_batches": 1, "rows": 5, "generators": 2}})


def run(
    folder: Path, base: dict[str, Any], placement: dict[str, Any] | None = None, *, kill: str = ""
) -> tuple[Pipeline, dict[str, Any], Any]:
    """The pipeline of a run, closed; statistics by station; the last weights. placement: None for a run in one process
    without devices."""
    folder.mkdir()
    changes = {"launcher": "inline"} if placement is None else {"launcher": "local", "placement": placement}
    with closed(build_pipeline(RunContext(config(base, **changes), folder=folder), record=True)) as pipeline:
        if kill:
            threading.Thread(target=kill_after_an_update, args=(pipeline, kill), daemon=True).start()
        pipeline.loop.train_until(VERSIONS)
        counters = pipeline.launcher.hosting.statistics(fresh=True)
        _, weights = pipeline.weights.read(VERSIONS)
    return pipeline, counters, weights


def kill_after_an_update(pipeline: Pipeline, name: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and pipeline.loop.conductor.versions.updates < 1:
        time.sleep(0.001)
    os.kill(process_ids(pipeline.launcher.hosting)[name], signal.SIGKILL)


def seats(simulators: str, generators: str, devices: int = 2) -> dict[str, Any]:
    return {
        "simulated_devices": devices,
        "simulators": {"devices": simulators},
        "generators": {"devices": generators, "threads": 1},
        "trainer": {"devices": "0", "threads": 1},
    }


def rows_on_device(counters: dict[str, Any], name: str) -> tuple[float, float]:
    """Rows that the generator read on its device, and all of its rows."""
    return counters[name].get("rows_on_device", 0), counters[name].get("rows", 0)


def test_a_generator_on_a_simulators_device_reads_there_and_another_one_on_the_host(tmp_path: Path) -> None:
    _, _, plain = run(tmp_path / "host", BASE)
    _, counters, weights = run(tmp_path / "devices", BASE, seats("0", "0,1"))
    assert all(torch.equal(plain[name], tensor) for name, tensor in weights.items())
    here, every = rows_on_device(counters, "generator-0")
    assert here == every > 0
    here, every = rows_on_device(counters, "generator-1")
    assert here == 0 < every


@long(5, "a lost station beside observations on a device")
@pytest.mark.parametrize("killed", ["simulator-0", "generator-0"])
def test_a_loss_leaves_no_observation_of_another_process(killed: str, tmp_path: Path) -> None:
    pipeline, counters, _ = run(
        tmp_path / "run", merge(ASYNCHRONOUS, {"env": TENSORS}), seats("0", "0", 1), kill=killed
    )
    lost = [decision.event.station for decision in pipeline.loop.trace if isinstance(decision.event, StationLost)]
    assert lost == [killed]
    assert pipeline.loop.conductor.ledger.imbalance == 0
    here, every = np.sum([rows_on_device(counters, f"generator-{number}") for number in (0, 1)], axis=0)
    assert here > 0.9 * every > 0


@long(4, "a simulator with a lease and a device")
def test_a_simulator_that_has_left_its_device_is_read_in_host_memory(tmp_path: Path) -> None:
    base = merge(LOCKSTEP, {"env": LEAVING})
    _, _, plain = run(tmp_path / "host", base)
    leased = {**seats("0", "0", 1), "sharing": "lease", "lease": {"min_hold_s": 0.05}}
    pipeline, counters, weights = run(tmp_path / "leased", base, leased)
    assert all(torch.equal(plain[name], tensor) for name, tensor in weights.items())
    left = [decision.event for decision in pipeline.loop.trace if isinstance(decision.event, DeviceYielded)]
    assert {event.station for event in left} == {"simulator-0", "generator-0", "trainer"}
    here, every = rows_on_device(counters, "generator-0")
    assert here == 0 < every
