"""Generator and trainer in one process on a CUDA device. Never run: no such device was at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.process.runs import ASYNCHRONOUS, closed, config

from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.runtime.hosting import dropped_messages, process_ids

pytestmark = pytest.mark.gpu


@pytest.mark.usefixtures("cuda")
def test_a_run_in_one_process_trains_on_the_device(tmp_path: Path) -> None:
    placement = {"sharing": "process", "generators": {"devices": "0"}, "trainer": {"devices": "0"}}
    settings = config(ASYNCHRONOUS, rollout={"generators": 1, "buckets": "powers"}, placement=placement)
    with closed(build_pipeline(RunContext(settings, folder=tmp_path))) as pipeline:
        pids = process_ids(pipeline.launcher.hosting)
        assert pids["generator-0"] == pids["trainer"]
        pipeline.loop.train_until(3)
        counters = pipeline.launcher.hosting.statistics(fresh=True)
        assert counters["generator-0"]["weights/reference/versions"] >= 3
        assert not dropped_messages(pipeline.launcher.hosting)
