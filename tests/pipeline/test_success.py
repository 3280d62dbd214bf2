"""Success is what the environment says: where it says nothing there are no rates, anywhere."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.cli.main import main
from polyrhythm.pipeline.callbacks import Callbacks, EvaluationResult
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run

RATES = ("successes", "rate", "low", "high")


class Watch:
    """Keeps what callbacks get."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.evaluations: list[EvaluationResult] = []

    def on_update(self, metrics: Any) -> None:
        self.updates.append(metrics)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)


def run(folder: Path, watch: object = (), launcher: str = "inline", **env: Any) -> dict[str, Any]:
    settings = config(
        env={"id": "tests.pipeline.reporting:Reporting-v0", "max_steps": 0, **env},
        training={"versions": 2},
        evaluation={"episodes": 6, "every": 1},
        launcher=launcher,
        rollout={"simulators": 2},
    )
    return train(validate_run(settings), folder, callbacks=Callbacks(watch))


def boards(folder: Path) -> set[str]:
    """The names of TensorBoard's curves."""
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {*board.Tags()["scalars"], *board.Tags()["tensors"]}


def test_without_a_report_rates_are_null_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch()
    summary = run(tmp_path, watch)
    evaluations = json.loads((tmp_path / "evaluations.json").read_text())
    for found in (summary["before"], summary["after"], *(entry["greedy"] for entry in evaluations)):
        assert [found[name] for name in RATES] == [None] * 4
        assert (found["episodes"], found["mean_return"]) == (6, 4.0)
    assert summary["best"]["greedy"]["rate"] is None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [
        value for line in lines for name, value in line.items() if "success_once" in name or name.endswith("/rate")
    ]
    assert rates == [None] * len(lines)
    drawn = boards(tmp_path)
    assert "env/return" in drawn
    assert not {name for name in drawn if "success" in name or name.rpartition("/")[2] in RATES}
    assert {metrics["env/success_once"] for metrics in watch.updates} == {None}
    assert {(one.rate, one.low, one.high, one.successes) for one in watch.evaluations} == {(None,) * 4}
    found = evaluate(tmp_path)
    assert [found[name] for name in RATES] == [None] * 4
    assert {one["success"] for one in found["per_episode"]} == {None}
    assert main(["eval", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("mean return 4, 6 episodes; the environment does not report success")
    page = (tmp_path / "report.html").read_text()
    assert '"id":"return","heading":"Mean return"' in page
    assert '"id":"success"' not in page
    said = [message for message in caplog.messages if message.startswith("env.success")]
    assert said[0] == (
        "env.success: the environment's info has no success, is_success or succeed, so it does not report success; in "
        "the first episode it had height; set the key that you mean, if it is one of them"
    )
    assert not [message for message in caplog.messages if "success in" in message]


@pytest.mark.parametrize("only", [False, True])
def test_where_an_episode_reports_it_the_others_count_as_failures(only: bool, tmp_path: Path) -> None:
    summary = run(tmp_path, kwargs={"key": "solved", "only": only}, success="solved")
    found = summary["after"]
    assert 0 < found["successes"] < found["episodes"]
    assert found["rate"] == found["successes"] / 6
    assert found["low"] < found["rate"] < found["high"]
    assert "env/success_once" in boards(tmp_path)
    seen = [one["success"] for one in evaluate(tmp_path)["per_episode"]]
    assert seen.count(True) == found["successes"]
    assert set(seen) == ({True, None} if only else {True, False})


@long(2, "with processes")
def test_processes_tell_of_a_misspelt_key_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    summary = run(tmp_path, launcher="local", kwargs={"key": "solved"}, success="sovled", metrics=["hieght"])
    assert summary["after"]["rate"] is None
    (said,) = [message for message in caplog.messages if message.startswith("env.metrics")]
    assert said.startswith("env.metrics.hieght: the environment's info has no such key; env.success = sovled: the ")
    assert said.endswith("in the first episode it had height, solved; set the key that you mean, if it is one of them")
    assert said in summary["warnings"]
    assert said in unescape((tmp_path / "report.html").read_text())


def test_check_has_a_note_with_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = config(env={"id": "tests.pipeline.reporting:Reporting-v0", "max_steps": 0, "success": "sovled"})
    Path("own.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    assert main(["check", "own.yaml", "launcher=inline"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "! info of the steps env.success = sovled: the environment's info has no such key" in told
    assert "in the first episode it had height fix: set the key" in told
