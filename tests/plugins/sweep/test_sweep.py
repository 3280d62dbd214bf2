"""`polyrhythm sweep`: real runs in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
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
from polyrhythm.errors import RunFolderError
from polyrhythm.observe.run_folder import lock_run_folder
from polyrhythm.plugins.sweep.child import take_run
from polyrhythm.plugins.sweep.command import conclusion
from polyrhythm.plugins.sweep.plan import JobResult
from polyrhythm.plugins.sweep.runs import SweepJournal, take_sweep_folder


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, out = write(tmp_path), str(tmp_path / "out")
    words = [recipe, "env.deadly=true,false", "--out", out]
    found = _sweep(capsys, *words, status=1)
    best, dead = found["combinations"]
    assert (best["settings"], best["failures"]) == ({"env.deadly": "false"}, 0)
    assert best["score"]["of"] == "success"
    assert dead["runs"][0]["failure"] == "killed by signal 9"
    assert (best["worse"], dead["worse"], found["runs"]) == (False, None, {"new": 2})
    assert found["page"] is None, "one run is no comparison"
    written = Path(best["runs"][0]["folder"], "summary.json").stat().st_mtime_ns
    caplog.set_level("INFO")
    again = _sweep(capsys, *words, status=1)
    assert again["combinations"][0] == best, "a finished run is not run again"
    assert again["runs"] == {"kept": 1, "again": 1}
    assert "kept, " in caplog.text
    assert "again after it had failed: killed by signal 9" in caplog.text
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
        (
            ["seed=1,2", "--seeds", "2"],
            ["seed varies: a seed is not a setting to choose; give one or none, and --seeds N"],
        ),
        (["seed=1,2"], ["seed varies: "]),
        (["evaluation.seed=1,2", "policy.hidden=8,9"], ["evaluation.seed varies: "]),
        (["seed=0..3", "--random", "2"], ["seed varies: "]),
        (["training.versions=1,2", "--halving"], ["--halving chooses it"]),
        (["--random", "2", "--seeds", "2"], ["nothing can be drawn"]),
        (["out_dir=a,b"], ["the sweep chooses it for each run"]),
        (["env.deadly=true,false", "placement=auto"], ["placement.start = plan: each", "set placement.start=recipe"]),
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


def _ranked(
    *intervals: tuple[float, float] | None, worse: Any = (), versions: int | None = None
) -> list[dict[str, Any]]:
    scores = [None if own is None else {"low": own[0], "high": own[1]} for own in intervals]
    return [
        {"settings": {"lr": str(place)}, "score": score, "worse": own, "versions": versions}
        for place, (score, own) in enumerate(zip(scores, worse, strict=True))
    ]


@pytest.mark.parametrize(
    ("ranked", "said"),
    [
        (_ranked((0.8, 0.9), (0.5, 0.6), worse=(False, True)), "best: lr=0; chosen by this result"),
        (_ranked((0.8, 1.0), (0.8, 1.0), worse=(False, False)), "shown between 1 and 2"),
        (
            _ranked((0.8, 1.0), (0.7, 0.9), (0.1, 0.2), worse=(False, False, True)),
            "shown between 1 and 2",
        ),
        (
            _ranked((0.8, 1.0), (0.5, 0.6), (0.4, 0.9), worse=(False, True, False)),
            "shown between 1 and 3",
        ),
        (_ranked((500.0, 500.0), (9.0, 9.0), worse=(False, False)), "have no interval; add --seeds 3"),
        (_ranked((0.8, 1.0), None, worse=(False, None)), "no other combination has a result"),
        (_ranked((0.8, 1.0), (0.1, 0.2), worse=(False, None), versions=8), "left by --halving: lr=0"),
        (_ranked((0.1, 0.2), (0.9, 1.0), worse=(False, None)), "no best: 2 did better where a run failed"),
        (_ranked((0.8, 1.0), worse=(False,)), ""),
        (_ranked(None, None, worse=(None, None)), ""),
    ],
)
def test_a_best_is_named_where_the_intervals_show_it(ranked: list[dict[str, Any]], said: str) -> None:
    found = " ".join(conclusion(ranked))
    assert said in found
    assert bool(said) == bool(found)


@long(20, "three runs")
def test_a_result_is_used_only_with_its_run_and_of_the_same_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write(tmp_path), tmp_path / "out"
    words = [recipe, "policy.hidden=8,9", "--out", str(out)]
    _sweep(capsys, *words)
    gone, kept = sorted(path.parent for path in out.glob("*/summary.json"))
    written, text = (kept / "summary.json").stat().st_mtime_ns, Path(recipe).read_text()
    shutil.rmtree(gone)
    for old, new, said in (
        ("versions: 2", "versions: 3", "training.versions was 2 and is 3 now"),
        ("versions: 2", "versions: 1", "training.versions was 2 and is 1 now"),
        ("epochs: 2", "epochs: 1", "training.epochs was 2 and is 1 now"),
    ):
        Path(recipe).write_text(text.replace(old, new))
        assert main(["sweep", *words]) == 2
        assert f"{said}; name another --out, or remove that run" in capsys.readouterr().err
    Path(recipe).write_text(text)
    found = _sweep(capsys, *words)
    assert [one["failures"] for one in found["combinations"]] == [0, 0]
    assert (gone / "summary.json").is_file(), "it is run again"
    assert (kept / "summary.json").stat().st_mtime_ns == written


def test_results_of_a_missing_run_are_forgotten_whatever_their_versions(tmp_path: Path) -> None:
    take_sweep_folder(tmp_path)
    journal = SweepJournal.open(tmp_path, "lamp")
    done = JobResult({"rate": 1.0})
    journal.results = {"lr=1-s0@2": done, "lr=1-s0@4": done, "lr=1-s00@4": done, "lr=2-s0@4": done}
    journal.forget("lr=1-s0")
    assert list(SweepJournal.open(tmp_path, "lamp").results) == ["lr=1-s00@4", "lr=2-s0@4"]


def test_a_run_still_in_use_is_told_with_its_holder(tmp_path: Path) -> None:
    with lock_run_folder(tmp_path):
        (tmp_path / "policy.pt").touch()
        with pytest.raises(RunFolderError, match=rf"in use by process {os.getpid()} after 0\.1 s; wait for it or end"):
            take_run(tmp_path, 0.1)
        assert (tmp_path / "policy.pt").exists(), "nothing is removed from a run that is in use"
    take_run(tmp_path, 0.1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("locked_before", [True, False])
def test_only_a_run_without_settings_is_removed(begun: bool, locked_before: bool, tmp_path: Path) -> None:
    for name in ("job/sweep.log", "checkpoints/one", "seen.jsonl", *["config.yaml"] * begun):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if locked_before:
        with lock_run_folder(tmp_path):
            pass
    before = {one.name for one in tmp_path.iterdir()}
    take_run(tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == (before if begun else {"job"})
    assert (tmp_path / "job" / "sweep.log").is_file()


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
    assert found["runs"] == {"resumed": 1, "new": 1}
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
    Path(recipe).write_text(Path(recipe).read_text().replace("minibatch_steps: 64", "minibatch_steps: 32"))
    assert main(["sweep", *words, "--optuna", "4"]) == 2
    assert "training.minibatch_steps was 64 and is 32 now" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="the extra optuna is not installed")
@pytest.mark.parametrize(
    ("proposed", "differs"),
    [
        ({"training.optimizer.lr": "0.001"}, "policy.hidden"),
        ({"training.optimizer.lr": "0.001", "policy.hidden": "32"}, "policy.hidden"),
        ({"training.optimizer.lr": "0.5", "policy.hidden": "8"}, "training.optimizer.lr"),
        ({"training.optimizer.lr": "0.001", "policy.hidden": "8", "seed": "3"}, "seed"),
    ],
)
def test_proposals_of_another_sweep_are_refused(
    proposed: dict[str, str], differs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = write(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "sweep.json").write_text(json.dumps({"recipe": recipe, "proposed": [proposed], "results": {}}))
    words = [recipe, "training.optimizer.lr=1e-4..1e-2:log", "policy.hidden=8,16", "--optuna", "2", "--out", str(out)]
    assert main(["sweep", *words]) == 2
    assert f"which this one would not ({differs} differs); name another --out" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("optuna") is not None, reason="the extra optuna is installed")
def test_a_missing_optuna_is_told_with_its_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", write(tmp_path), "policy.hidden=8,16", "--optuna", "2"]) == 2
    assert "it needs the package optuna; run" in capsys.readouterr().err
