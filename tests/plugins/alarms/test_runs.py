"""A run that learns nothing says so in its log and its report."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tests.long import long
from tests.pipeline.runs import config
from tests.plugins.language.test_language_runs import SINGLE, run
from tests.plugins.scoring.test_runs import UNJUDGED

from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run


def test_a_run_whose_answers_all_earn_the_same_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _, updates = run(tmp_path, *SINGLE, UNJUDGED, "launcher=inline")
    assert [line["train/actor/zero_advantage_fraction"] for line in updates] == [1.0] * 3
    said = [message for message in caplog.messages if "zero_advantage" in message]
    assert len(said) == 1
    assert "in update 1: in every group all samples have earned the same" in said[0]
    data = json.loads((tmp_path / "report.html").read_text().partition(' id="data">')[2].partition("</script>")[0])
    advice = next(section["parts"] for section in data["sections"] if section["id"] == "advice")
    told = f"1. Stability: {said[0].partition('; ')[0]}; take easier or harder tasks."
    assert advice[0] == {"kind": "text", "text": told, "tone": "notice"}


@long(3, "a run that is spoilt")
def test_an_evaluation_that_collapses_is_a_warning_of_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that are far too long undo what was imitated."""
    spoilt = ("training.optimizer.lr=3.0", "training.optimizer.grad_clip=null", "evaluation.episodes=64")
    taught = ("env.terms=[2,2]", "supervised.steps=150", "supervised.batch_size=32", "policy.width=32")
    with caplog.at_level(logging.WARNING):
        summary, _ = run(tmp_path, *SINGLE, *taught, *spoilt, "launcher=inline")
    assert summary["after"]["high"] < summary["before"]["low"], "else there is nothing to warn of"
    (said,) = [message for message in caplog.messages if message.startswith("evaluation/greedy/rate = ")]
    assert "at version 3: all of the interval is below that of version 0" in said
    assert said.partition("; ")[0] in (tmp_path / "report.html").read_text()


def test_the_conclusion_follows_training_and_is_not_repeated_by_a_resumed_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = config(training={"versions": 16, "optimizer": {"lr": 1e-9}}, evaluation={"episodes": 2})
    with caplog.at_level(logging.INFO):
        train(validate_run(slow), tmp_path)
    told = [place for place, message in enumerate(caplog.messages) if "have not become better" in message]
    (concluded,) = [place for place in told if caplog.records[place].levelname == "WARNING"]
    after = [place for place, message in enumerate(caplog.messages) if message.startswith("after, version 16")]
    assert concluded < after[0]
    caplog.clear()
    (tmp_path / "summary.json").unlink()
    train(validate_run(slow, begun=True), tmp_path)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert not [message for message in warned if "have not become better" in message]
