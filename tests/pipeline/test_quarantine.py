"""Live: seeds whose episodes always raise are set aside, and training and evaluation go on with the others."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.runs import config

from polyrhythm.config.sections.learning import EvaluationSettings
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.specs.hashing import library_seed


def test_seeds_that_always_raise_are_set_aside_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(
        env={"id": "tests.pipeline.sour_seeds:SourSeeds-v0"},
        groups={"size": 2},
        rollout={"max_attempts": 9, "quarantine_after": 3},
        evaluation={"episodes": 12, "sampled": False},
    )
    with caplog.at_level(logging.WARNING):
        summary = train(validate_run(settings), tmp_path)
    ledger = summary["ledger"]
    assert ledger["trained"] == settings.training.versions * settings.training.batch_size
    training = of_training(summary)
    assert training
    assert ledger["dropped"].keys() == {"environment raised"}
    assert len(training) <= ledger["dropped"]["environment raised"] <= 2 * len(training), "of members granted"
    assert all(
        library_seed(one["seed"]) % 4 == 0 and one["reason"] == "environment raised" for one in summary["set_aside"]
    )
    missing = len(summary["set_aside"]) - len(training)
    assert missing > 0, "the evaluation before training met some"
    for name in ("before", "after"):
        assert (summary[name]["episodes"], summary[name]["dropped"]) == (12 - missing, missing)
    told = [message for message in caplog.messages if "is set aside after 3 failures" in message]
    assert len(told) == len(summary["set_aside"])
    report = (tmp_path / "report.html").read_text()
    assert all(f'"{one["seed"]}"' in report for one in summary["set_aside"])
    assert json.loads((tmp_path / "summary.json").read_text())["set_aside"] == summary["set_aside"]


def of_training(summary: dict[str, Any]) -> list[dict[str, Any]]:
    held = {episode.seed for episode in held_out(12, EvaluationSettings().seed, 1, greedy=True)}
    return [one for one in summary["set_aside"] if one["seed"] not in held]
