"""A call that hangs takes its simulator; the task and seed that hangs is set aside, its neighbours are not."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
from tests.long import long
from tests.process.runs import children, config

from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out


@pytest.mark.timeout(900)
@long(40, "a simulator that hangs and is replaced three times")
def test_a_seed_that_hangs_is_set_aside_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    episodes = held_out(4, 5, 1, greedy=True)
    bad = episodes[1].seed
    settings = config(
        launcher="local",
        env={"type": "tests.process.settings:HangingSettings", "id": "CartPole-v1", "max_steps": 40, "hangs": bad},
        rollout={"simulators": 1, "env_batches": 1, "rows": 4, "generators": 1, "segment_steps": 0},
        supervision={"step_s": 5.0},
    )
    with (
        caplog.at_level(logging.WARNING),
        closing(build_pipeline(RunContext(settings, folder=tmp_path, trainer=False))) as pipeline,
    ):
        results = pipeline.evaluate("evaluation", episodes)
        found = pipeline.loop.conductor.summary()["set_aside"]
    assert sorted(result.seed for result in results) == sorted(one.seed for one in episodes if one.seed != bad)
    assert [(one["seed"], one["reason"]) for one in found] == [(bad, "simulator lost")]
    assert sum("simulator-0" in message for message in caplog.messages) >= 3
    assert not children()
