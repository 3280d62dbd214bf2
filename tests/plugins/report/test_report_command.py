"""`polyrhythm report`, and the page that training leaves behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polyrhythm.cli.main import main

SMALL = ["training.versions=2", "training.mini_batch_samples=4", "rollout.rows=4", "evaluation.episodes=4"]


def test_training_leaves_a_report_and_it_can_be_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["train", "cartpole", "launcher=inline", *SMALL, "--out", str(folder)]) == 0
    assert f"report: {folder / 'report.html'}" in capsys.readouterr().out
    whole = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").read_text() == whole
    shutil.copytree(folder, tmp_path / "other")
    page = tmp_path / "comparison.html"
    for again in ([], [str(page)]):  # as a shell's RUNS/* finds it the second time
        assert main(["compare", str(folder), str(tmp_path / "other"), *again]) == 0
        assert "2 runs compared" in page.read_text()


def test_a_run_is_not_lost_with_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from polyrhythm.config.load import load_config
    from polyrhythm.pipeline.train import train
    from polyrhythm.pipeline.validation.check import validate_run

    (tmp_path / "report.html").mkdir()  # nothing can be written there
    assert "after" in train(validate_run(load_config("cartpole", ["launcher=inline", *SMALL])), tmp_path)
    assert (tmp_path / "summary.json").is_file()
    assert "no report was written; the run is complete" in caplog.text


def test_no_run_is_refused_and_of_runs_the_newest_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no config.yaml; name the folder of a run" in capsys.readouterr().err
    (tmp_path / "newest").mkdir()
    (tmp_path / "newest" / "config.yaml").touch()
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'newest' / 'report.html'}\n"
