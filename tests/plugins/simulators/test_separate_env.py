"""Runs whose environment is in another Python: the same weights, and the loss of its process costs no sample."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.long import long
from tests.plugins.simulators.other_pythons import other_python
from tests.process.runs import LOCKSTEP, PATIENCE_S, children, config
from tests.process.test_supervision import balanced, lost, run

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext

PINNED = "tests.plugins.simulators.pinned_env:PinnedSettings"
POLICY = {"type": "gaussian", "hidden": 8}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(other_python(tmp_path_factory.mktemp("python"), 1))


def test_a_lock_step_run_gives_the_same_weights(python: str, tmp_path: Path) -> None:
    weights, there = [], {"python": python}
    for name, env, launcher in (("here", {}, "inline"), ("inline", there, "inline"), ("local", there, "local")):
        (tmp_path / name).mkdir()
        pipeline = build_pipeline(
            RunContext(config(merge(LOCKSTEP, {"env": env}), launcher=launcher), folder=tmp_path / name)
        )
        try:
            pipeline.loop.train_until(2)
            weights.append(pipeline.weights.read(2)[1])
        finally:
            pipeline.close()
        assert not children()
    for other in weights[1:]:
        assert all(torch.equal(x, other[key]) for key, x in weights[0].items())


@long(4, "a killed server")
def test_when_its_process_ends_the_simulator_is_replaced_and_no_sample_is_lost(python: str, tmp_path: Path) -> None:
    def kill_one(_: Any) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            own = [child for child in children() if "separate.server" in str(child.cmdline())]
            servers = [child for child in own if child.ppid() != os.getpid()]  # main has one for the spec
            if servers:
                time.sleep(0.3)
                os.kill(servers[0].pid, signal.SIGKILL)
                return

    env = {"type": PINNED, "python": python}
    pipeline = run(tmp_path, 15, during=kill_one, env=env, policy=POLICY)
    assert {event.station.partition("-")[0] for event in lost(pipeline)} == {"simulator"}
    assert balanced(pipeline, 15 * pipeline.loop.conductor.settings.batch_size)
