"""`polyrhythm plan`: what limited a run; with --theory times that are given or of a run; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.cli.main import main

GIVEN = ["--samples", "64", "--workers", "8", "--rollout", "10s", "--train", "3s", "--max-lag", "1"]


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["plan", "--theory", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_given_times(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, *GIVEN)
    assert found["t_sync_s"] == pytest.approx(80 + 24 + 10)
    assert found["t_async_s"] == pytest.approx(80 + 24 + 5)
    assert found["splits"]["equal_pace"]["training"] == 2
    assert found["measured"] is None
    twice = _json(capsys, *GIVEN, "--epochs", "2", "--longest", "30s")
    assert twice["t_sync_s"] == pytest.approx(80 + 48 + 30)
    assert twice["t_sync_floor_s"] == pytest.approx(80 + 48)


def test_a_law_without_an_end_gets_the_longest_that_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    given = _json(capsys, *GIVEN, "--rollout", "lognormal:10s:0.8")["given"]
    assert given["rollout_s"] == pytest.approx(10.0)
    assert 40 < given["longest_s"] < given["pool_longest_s"] < 80


def test_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--theory", *GIVEN]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "samples of a version  64"
    assert "T_sync                114 s a version at most, 104 s at least" in lines
    assert "T_async, max_lag 1    109 s, with β* = 0.220" in lines
    assert "workers that train             2              2" in lines
    assert main(["plan", "--theory", *GIVEN, "--max-lag", "0"]) == 0
    assert "warning" in capsys.readouterr().out


def test_times_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    small = ["training.versions=3", "training.mini_batch_samples=4", "rollout.rows=4", "evaluation.episodes=2"]
    assert main(["train", "cartpole", "launcher=inline", *small, "freshness.max_lag=2", "--out", str(folder)]) == 0
    capsys.readouterr()
    found = _json(capsys, str(folder))
    given, measured = found["given"], found["measured"]
    assert (given["samples"], given["workers"], given["max_lag"]) == (4, 3, 2.0)
    summary = json.loads((folder / "summary.json").read_text())
    assert measured["version_s"] == pytest.approx(summary["wall_s"]["rl"] / 3)
    busy = summary["utilisation"]["simulator-0"] + summary["utilisation"]["generator-0"]
    assert given["rollout_s"] == pytest.approx(busy * summary["wall_s"]["rl"] / 12)
    assert given["longest_s"] >= given["rollout_s"]

    other = _json(capsys, str(folder), "--workers", "2", "--max-lag", "1", "--train", "10ms")["given"]
    assert (other["workers"], other["max_lag"], other["train_s"]) == (2, 1.0, 0.01)
    assert other["longest_s"] == pytest.approx(given["longest_s"] * 3 / 2)
    assert main(["plan", "--theory", str(folder)]) == 0
    assert "a version in that run" in capsys.readouterr().out

    assert main(["plan", "--theory", str(folder), "--epochs", "2"]) == 2
    assert "--epochs without --train; a run's training time includes all epochs" in capsys.readouterr().err
    (folder / "summary.json").write_text('{"rl"')
    assert main(["plan", "--theory", str(folder)]) == 2
    assert "is truncated" in capsys.readouterr().err
    (folder / "summary.json").write_text("{}")
    assert main(["plan", "--theory", str(folder)]) == 2
    assert "summary.json has no ledger; name a run that trained to its end" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--samples, --workers, --rollout, --train, --max-lag missing; give all of them, or the folder"),
        (GIVEN[2:], "--samples missing"),
        ([*GIVEN, "--workers", "1"], "workers is 1; it takes 2"),
        ([*GIVEN, "--rollout", "10"], "--rollout: duration '10' is not a number with a unit; write for example 10ms"),
        ([*GIVEN, "--rollout", "pareto:10s:2"], "--rollout: distribution 'pareto:10s:2' has the unknown type 'pareto'"),
        ([*GIVEN, "--train", "fast"], "--train: duration 'fast' is not a number with a unit"),
        ([*GIVEN, "--longest", "9s"], "longest is 9; make it at least the mean, 10"),
        ([*GIVEN, "--train", "0s"], "train is 0; make it more than 0 seconds"),
        ([*GIVEN, "--max-lag", "-1"], "max_lag is -1; make it 0 or more"),
        ([*GIVEN, "--max-lag", "nan"], "max_lag is nan; make it 0 or more"),
        (["nowhere"], "nowhere is not there; name the folder of a run"),
    ],
)
def test_what_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--theory", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert said in told.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--theory", *GIVEN, "--devices", "8"], "plan --theory: --devices is for --memory; leave it out"),
        (["--memory", "cartpole", "--samples", "3", "--max-lag", "1"], "--samples, --max-lag is for --theory"),
        (GIVEN, "plan RUN: --samples, --workers, --rollout, --train, --max-lag is for --theory; leave it out"),
        ([], "plan: name the folder of one run, or add --gpus N, --theory or --memory"),
        (["cartpole"], "plan cartpole: it is a recipe; add --gpus N"),
        (["cartpole", "seed=3"], "plan cartpole: it is a recipe; add --gpus N"),
        (["nowhere", "seed=3"], "plan: name the folder of one run, or add --gpus N, --theory or --memory"),
        (["nowhere"], "nowhere is not there; name the folder of a run"),
    ],
)
def test_options_of_the_other_kind_of_plan_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_of_ones_own_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("extends: cartpole\n", encoding="utf-8")
    assert main(["plan", "own.yaml"]) == 2
    assert "plan own.yaml: it is a recipe; add --gpus N" in capsys.readouterr().err
