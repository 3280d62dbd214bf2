"""Commands that list and copy: recipes, settings, new; and the shipped descriptions of `simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polyrhythm.cli.main import main
from polyrhythm.config.recipes import examples_folder, recipe_names
from polyrhythm.config.schema import RunConfig


def test_recipes_are_listed_with_their_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(10 < len(line.split(maxsplit=1)[1]) < 160 for line in lines)
    assert main(["recipes", "cartpole"]) == 0
    assert "env: gymnasium:CartPole-v1" in capsys.readouterr().out


def test_settings_are_explained_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "training.optimizer", "--json"]) == 0
    found = {setting["name"]: setting for setting in json.loads(capsys.readouterr().out)}
    assert found["training.optimizer.grad_clip"]["default"] == 1.0
    assert all(setting["about"] for setting in found.values())
    for words, expected in (
        (["settings"], "freshness: section"),
        (["settings", "freshness.max_lag"], "freshness.max_lag: float, 2.0"),
        (["settings", "batching"], "batching[dynamic].max_wait_ms: float"),
        (["settings", "batching.type"], "batching[dynamic].max_wait_ms: float"),
        (["settings", "env"], "env: section, required"),
    ):
        assert main(words) == 0
        assert expected in capsys.readouterr().out
    for section in RunConfig.model_fields:
        assert main(["settings", section]) == 0
    assert "algorithm.advantage: gae | v_trace | " in (listed := capsys.readouterr().out)
    assert "algorithm.loss[module:function].settings: section" in listed
    assert main(["settings", "training.optimiser"]) == 2
    assert "did you mean optimizer?" in capsys.readouterr().err
    assert main(["settings", "max_lag"]) == 2
    assert "did you mean freshness.max_lag?" in capsys.readouterr().err


def test_an_example_is_copied_and_nothing_is_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new"]) == 0
    listed = capsys.readouterr().out
    assert all(path.name in listed for path in examples_folder().iterdir() if path.is_dir())
    assert main(["new", str(tmp_path / "mine")]) == 0
    assert f"cd {tmp_path / 'mine'} && polyrhythm train point.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    assert main(["train", "point.yaml", "--check"]) == 0
    assert main(["new", str(tmp_path / "mine")]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "other"), "own_envs"]) == 2
    assert "did you mean own_env" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_an_example_that_extends_another_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["new", str(tmp_path / "mine"), "own_policy"]) == 0
    assert "mine: bounded.py, bounded.yaml, point.py, point.yaml" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "mine")
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    for module in ("point", "bounded"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert main(["train", "bounded.yaml", "--check"]) == 0


def test_shipped_clusters_are_simulated_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] > 0
    assert main(["simulate", "smal"]) == 2
    assert "or a shipped one: batch_rollout" in capsys.readouterr().err
