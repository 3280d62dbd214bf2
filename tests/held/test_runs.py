"""Run folders that commit cab4a14d saved (`python -m tests.held.save_runs`) go on."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.held.save_runs import FOLDER, RUNS
from tests.long import long
from tests.process.runs import children, orphaned_folders

from polyrhythm.cli.main import main

#: The others are of fewer kinds of records, or need more processes.
USUAL = "cut"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == USUAL else long(4, name)) for name in RUNS])
def test_a_run_that_was_saved_then_goes_on(name: str, tmp_path: Path) -> None:
    """What was trained stays trained, samples that waited are trained, and every update has its line once."""
    with tarfile.open(FOLDER / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    (run,) = tmp_path.iterdir()
    saved = json.loads(max((run / "checkpoints").glob("run-??????/run.json")).read_text())
    versions = saved["version"] + 3
    assert main(["resume", str(run), f"training.versions={versions}"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    ledger = summary["ledger"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "train/actor/policy_loss" in line]
    assert [line["step"] for line in updates] == list(range(versions))
    assert ledger["trained"] == updates[-1]["samples/trained"] > 0
    assert not summary["faults"]
    assert not children()
    assert not orphaned_folders()
