"""`batching: auto` in a real run: chosen, said in the log, marked in the trace, kept in the summary."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import yaml
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.cli.main import main
from polyrhythm.config.load import merge
from polyrhythm.flow import records
from polyrhythm.observe import TraceWriter
from polyrhythm.pipeline.observers import Timeline

AUTO = {
    "batching": {"type": "auto"},
    "freshness": {"max_lag": 1.0, "on_update": "continue"},
    "rollout": {"rows": 4, "env_batches": 2, "routing": "affinity", "generators": 2},
    "training": {"versions": 40, "order": "arrival"},
}


def test_a_run_says_what_it_chose_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(merge(LOCKSTEP, AUTO)))
    with caplog.at_level(logging.INFO):
        assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    said = [message for message in caplog.messages if "a pass takes" in message]
    assert said
    assert said[-1].endswith(summary["batching"]["reason"])
    trace = (tmp_path / "run" / "trace.json").read_text()
    assert summary["batching"]["reason"] in trace


def test_the_timeline_marks_a_choice(tmp_path: Path) -> None:
    chosen = records.BatchingChosen(32, 4, 0.0025, "because")
    with TraceWriter(tmp_path / "trace.json") as trace:
        Timeline(trace, 10.0).decided(11.5, records.Wake(), [chosen])
    (mark,) = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "i"]
    assert (mark["name"], mark["ts"], mark["args"]) == ("up to 4 requests, 2.5 ms", 1.5e6, {"reason": "because"})
