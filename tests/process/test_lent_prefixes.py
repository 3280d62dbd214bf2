"""Whole runs whose generators lend prefixes to the trainer: in one process, in several, and while either is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.process.runs import ASYNCHRONOUS, LOCKSTEP, closed, config

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.callbacks import Callbacks, StopTraining
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler.records import StationLost

VERSIONS = 4
POLICY = {"type": "tests.plugins.pretrained.adapted:SmallSettings", "train": "expert", "width": 16}
TRAINING = {"epochs": 1, "versions": VERSIONS}
#: Each generator has the requests of one simulator.
ROLLOUT = {"simulators": 2, "env_batches": 1, "rows": 5, "generators": 2}
BASE = merge(LOCKSTEP, {"policy": POLICY, "rollout": ROLLOUT, "training": TRAINING})


class Shares(Observer):
    """Lent share of the chunk steps of each update; None if the update does not say."""

    def __init__(self) -> None:
        self.of: dict[int, float | None] = {}

    def on_report(self, now: float, report: Report) -> None:
        if report.topic == "update":
            self.of[report.step] = report.values.get("train/actor/lent_fraction")


def run(
    folder: Path, base: dict[str, Any] = BASE, *, kill: str = "", **changes: Any
) -> tuple[Pipeline, list[float | None], dict[str, torch.Tensor]]:
    """A run, of which a station is killed after an update; the pipeline, closed, lent shares by update, and the last
    weights."""
    folder.mkdir()
    shares = Shares()
    with closed(build_pipeline(RunContext(config(base, **changes), folder=folder), record=True)) as pipeline:
        pipeline.loop.add_observers(shares)
        for version in range(1, VERSIONS + 1):
            pipeline.loop.train_until(version)
            if kill and version == 1:
                os.kill(process_ids(pipeline.launcher.hosting)[kill], signal.SIGKILL)
        _, weights = pipeline.weights.read(VERSIONS)
        weights = {name: x.clone() for name, x in weights.items()}
    assert sorted(shares.of) == list(range(VERSIONS))
    return pipeline, [shares.of[update] for update in range(VERSIONS)], weights


def near(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(weights[name], x, atol=1e-5, rtol=1e-5, msg=name)


def test_runs_on_lent_prefixes_learn_what_runs_on_computed_ones_do(tmp_path: Path) -> None:
    _, none, computed = run(tmp_path / "computed", launcher="inline", training={"precomputed_mib": 0})
    assert none == [None] * VERSIONS
    _, whole, here = run(tmp_path / "here", launcher="inline")
    _, shares, weights = run(tmp_path / "lent")
    assert whole == shares == [1.0] * VERSIONS
    near(here, computed)
    near(weights, computed)
    on_devices = {"simulated_devices": 2, "trainer": {"devices": "0"}, "generators": {"devices": "0,1"}}
    _, shares, weights = run(tmp_path / "devices", placement=on_devices)
    assert all(share is not None and 0.2 < share < 0.8 for share in shares), "one of two generators is on its device"
    near(weights, computed)


@pytest.mark.parametrize("killed", ["trainer", pytest.param("generator-0", marks=long(15, "a lost generator"))])
def test_a_loss_costs_prefixes_and_nothing_else(killed: str, tmp_path: Path) -> None:
    base = merge(ASYNCHRONOUS, {"policy": POLICY, "training": TRAINING})
    pipeline, shares, _ = run(tmp_path / "run", base, kill=killed)
    lost = [decision.event.station for decision in pipeline.loop.trace if isinstance(decision.event, StationLost)]
    assert lost == [killed]
    assert pipeline.loop.conductor.ledger.imbalance == 0
    assert shares[0] == 1.0
    assert shares[-1] is not None
    assert shares[-1] > 0.5


@long(20, "two ranks, whose pool is the first one's")
def test_ranks_of_one_device_have_one_pool(tmp_path: Path) -> None:
    _, _, expected = run(tmp_path / "computed", launcher="inline", training={"precomputed_mib": 0})
    _, shares, weights = run(tmp_path / "ranks", placement={"trainer": {"ranks": 2}})
    assert shares == [1.0] * VERSIONS
    del expected["network.head.bias"]  # its gradient is zero but for rounding
    near(weights, expected)


def test_a_resumed_run_computes_what_was_lent_before(tmp_path: Path) -> None:
    def cut(metrics: object) -> None:  # samples for the next updates are in the buffer by now
        raise StopTraining

    training = {**TRAINING, "mini_batch_samples": 6}
    changes: dict[str, Any] = {
        "policy": POLICY,
        "training": training,
        "launcher": "inline",
        "freshness": {"max_lag": 2},
    }
    base = merge(ASYNCHRONOUS, changes)
    with pytest.raises(StopTraining):
        train(validate_run(config(base)), tmp_path, callbacks=Callbacks(cut))
    train(validate_run(config(base, resume=str(tmp_path))), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    shares = [x["train/actor/lent_fraction"] for x in map(json.loads, lines) if "train/actor/lent_fraction" in x]
    assert len(shares) == VERSIONS
    assert shares[0] == 1.0
    assert min(shares[1:]) < 1.0, "of samples in the buffer"
