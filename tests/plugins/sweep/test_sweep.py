"""`polyrhythm sweep`: real runs in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.long import long
from tests.plugins.sweep.recipe import write

from polyrhythm.cli.main import main


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs' processes find the recipe's environment."""
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))


def _sweep(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main(["sweep", *words, "--json"]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_killed_run_does_not_end_the_sweep_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write(tmp_path), str(tmp_path / "out")
    words = [recipe, "env.deadly=true,false", "--out", out]
    found = _sweep(capsys, *words, status=1)
    best, dead = found["combinations"]
    assert (best["settings"], best["failures"]) == ({"env.deadly": "false"}, 0)
    assert best["score"]["of"] == "success"
    assert dead["runs"][0]["failure"] == "killed by signal 9"
    assert found["page"] is None, "one run is no comparison"
    written = Path(best["runs"][0]["folder"], "summary.json").stat().st_mtime_ns
    again = _sweep(capsys, *words, status=1)
    assert again["combinations"][0] == best, "a finished run is not run again"
    assert Path(best["runs"][0]["folder"], "summary.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.optimizer.lr=1e-3,-1", "training.epochs=1,0"], ["lr=1e-3, epochs=0: ", "lr=-1, epochs=1: "]),
        (["env.deadly=true,maybe"], ["deadly=maybe: "]),
        (["evaluation.episodes=4,0"], ["episodes=0: evaluation.episodes = 0: runs are ranked by"]),
        (["policy.hidden=8,4..6"], ["hidden"]),
        (["training.optimizer.lr=1e-4..1e-3"], ["a range has no list of values; add --random N"]),
        (["training.optimizer.lr=1e-3"], ["no setting varies"]),
        (["seed=1,2", "--seeds", "2"], ["seed varies, and --seeds would vary it too"]),
        (["training.versions=1,2", "--halving"], ["--halving chooses it"]),
        (["--random", "2", "--seeds", "2"], ["nothing can be drawn"]),
        (["out_dir=a,b"], ["the sweep chooses it for each run"]),
    ],
)
def test_everything_is_checked_before_the_first_run(
    words: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write(tmp_path)
    assert main(["sweep", recipe, *words, "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert all(one in told for one in said), told
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path)
    assert main(["sweep", recipe, "policy.hidden=8,9", "--out", str(tmp_path)]) == 2
    assert "is not empty and holds no sweep; name another" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text('{"recipe": "other", "proposed": [], "results": {}}')
    assert main(["sweep", recipe, "policy.hidden=8,9", "--out", str(tmp_path)]) == 2
    assert "holds a sweep of other, not of" in capsys.readouterr().err
    (tmp_path / "sweep.json").write_text("[1]")
    assert main(["sweep", recipe, "policy.hidden=8,9", "--out", str(tmp_path)]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


@long(40, "a sweep by halving")
def test_halving_continues_the_runs_of_the_better_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path)
    words = [recipe, "training.optimizer.lr=1e-4,1e-3,3e-3,1e-2", "training.versions=4", "--halving"]
    found = _sweep(capsys, *words, "--out", str(tmp_path / "out"))
    assert [one["versions"] for one in found["combinations"]] == [4, 2, 1, 1]
    assert Path(found["page"]).is_file()
    last = Path(found["combinations"][0]["runs"][0]["folder"])
    steps = [json.loads(line)["step"] for line in (last / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 4
    assert len((last / "settings_changes.jsonl").read_text().splitlines()) == 2, "continued twice, not begun anew"


@long(40, "a sweep that is killed")
def test_a_killed_sweep_goes_on_with_its_unfinished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path)
    words = [recipe, "training.optimizer.lr=1e-3,2e-3", "training.versions=150", "--out", str(tmp_path / "out")]
    words += ["--at-once", "1", "checkpoint.run_every_s=0"]
    process = subprocess.Popen([sys.executable, "-m", "polyrhythm", "sweep", *words], stderr=subprocess.DEVNULL)
    metrics, deadline = next_metrics(tmp_path / "out"), time.monotonic() + 120
    while len(metrics()) < 20:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = _sweep(capsys, *words)
    assert [one["failures"] for one in found["combinations"]] == [0, 0]
    log = (tmp_path / "out").glob("lr=1e-3-*/job/sweep.log")
    text = next(log).read_text()
    assert text.count("evaluation before …") <= 1
    assert "interrupted" in text
    updates = [line["step"] for line in metrics() if "train/actor/policy_loss" in line or "staleness/lag_mean" in line]
    assert sorted(set(updates)) == list(range(150)), "no update is missing"


def next_metrics(out: Path) -> Any:
    def read() -> list[dict[str, Any]]:
        files = list(out.glob("lr=1e-3-*/metrics.jsonl"))
        return [json.loads(line) for line in files[0].read_text().splitlines()] if files else []

    return read


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="the extra optuna is not installed")
def test_optuna_proposes_and_is_asked_again_in_vain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write(tmp_path)
    words = [recipe, "training.optimizer.lr=1e-4..1e-2:log", "policy.hidden=8,16", "training.epochs=1..3"]
    words += ["--out", str(tmp_path / "out"), "--at-once", "1"]
    first = _sweep(capsys, *words, "--optuna", "2")
    assert len(first["combinations"]) == 2
    more = _sweep(capsys, *words, "--optuna", "3")
    assert len(more["combinations"]) == 3
    before = [one["settings"] for one in first["combinations"]]
    assert all(settings in [one["settings"] for one in more["combinations"]] for settings in before)


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="the extra optuna is installed")
def test_a_missing_optuna_is_told_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", write(tmp_path), "policy.hidden=8,16", "--optuna", "2"]) == 2
    assert "it needs the package optuna; run" in capsys.readouterr().err
