"""What the examples folder promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyrhythm.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_environment_of_ones_own_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES / "own_env")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_env"))
    folder = tmp_path / "run"
    assert main(["train", "point.yaml", "--out", str(folder), "launcher=inline"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"]["rate"] < 0.2
    assert summary["after"]["low"] > 0.5
    assert summary["best"]["greedy"]["rate"] >= summary["after"]["rate"]
    shown = capsys.readouterr().out
    assert "best.pt" in shown
    assert "\nfaults      none\n" in shown


def test_failures_of_an_environment_are_counted_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example, with a step that raises now and then, and one that always does."""
    source, recipe = ((EXAMPLES / "own_env" / name).read_text() for name in ("point.py", "point.yaml"))
    faulty = source.replace(
        "        self._position[rows] += self._step_size * actions\n",
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        if self.calls % EVERY == 0:\n"
        "            raise RuntimeError('the gripper is stuck')\n"
        "        self._position[rows] += self._step_size * actions\n",
    )
    assert faulty != source
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, every in (("stuck_now_and_then", 40), ("stuck_always", 1)):
        (tmp_path / f"{name}.py").write_text(faulty.replace("EVERY", str(every)).replace("point:", f"{name}:"))
        (tmp_path / f"{name}.yaml").write_text(recipe.replace("point:", f"{name}:"))
    few = ["launcher=inline", "training.versions=4", "evaluation.every=0"]
    folder = tmp_path / "run"
    assert main(["train", str(tmp_path / "stuck_now_and_then.yaml"), "--out", str(folder), *few]) == 0
    failed = json.loads((folder / "summary.json").read_text())["failed_samples"]
    assert failed["step: RuntimeError"] > 0
    assert f"failed samples  {failed['step: RuntimeError']} by step: RuntimeError" in capsys.readouterr().out
    assert main(["train", str(tmp_path / "stuck_always.yaml"), "--out", str(tmp_path / "other"), *few]) == 2
    told = capsys.readouterr().err
    assert "was dropped, the last one: step: RuntimeError: the gripper is stuck (task " in told
