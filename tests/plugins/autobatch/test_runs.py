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

AUTO = {
    "batching": {"type": "auto"},
    "freshness": {"max_lag": 1.0, "on_update": "continue"},
    "rollout": {"rows": 4, "env_batches": 2, "routing": "affinity", "generators": 2},
    "training": {"versions": 16, "order": "arrival"},
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
