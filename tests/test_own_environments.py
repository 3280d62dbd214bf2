"""What docs/own-environments.md shows is what runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest

from polyrhythm.cli.main import main
from polyrhythm.envs.base import Variant
from polyrhythm.specs import EnvSpec

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "own-environments.md").read_text(encoding="utf-8")
README = (DOCS.parent / "README.md").read_text(encoding="utf-8")
FIRST = (DOCS / "first-environment.md").read_text(encoding="utf-8")


def snippets(language: str, page: str = PAGE) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def test_the_environment_of_the_readme_needs_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, content in re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", README, flags=re.DOTALL):
        (tmp_path / name).write_text(content)
    assert {path.name for path in tmp_path.iterdir()} == {"line.py", "line.yaml"}
    try:
        assert main(["check", "line.yaml"]) == 0
        assert "checks passed" in capsys.readouterr().out
    finally:
        gymnasium.registry.pop("Line-v0", None)
        sys.modules.pop("line", None)


def test_the_first_environment_is_checked_and_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (module,), (recipe,) = snippets("python", FIRST), snippets("yaml", FIRST)
    (tmp_path / "line.py").write_text(module)
    (tmp_path / "line.yaml").write_text(recipe)
    try:
        assert main(["check", "line.yaml"]) == 0
        assert "checks passed" in capsys.readouterr().out
        assert main(["train", "line.yaml", "--out", "run", "launcher=inline", "preset=lockstep", "seed=1"]) == 0
    finally:
        gymnasium.registry.pop("Line-v0", None)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["before"]["rate"] < 0.2
    assert summary["after"]["rate"] > 0.6


def test_the_recipe_trains_in_the_environment_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (module, _, _), (recipe,) = snippets("python"), snippets("yaml")
    (tmp_path / "reach.py").write_text(module)
    (tmp_path / "reach.yaml").write_text(recipe)
    few = ["training.versions=3", "evaluation.episodes=4", "launcher=inline"]
    try:
        assert main(["train", "reach.yaml", "--out", "run", *few]) == 0
    finally:
        gymnasium.registry.pop("Reach-v0", None)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "throughput/transitions" in line]
    assert len(updates) == 3
    assert all(0 < line["env/metrics/distance"] < 9 and 0 < line["env/metrics/effort"] <= 20 for line in updates)
    assert all(-20 * 0.2 <= line["env/return"] < 0 for line in updates), "rewards are clipped at -0.2"
    summary = json.loads(Path("run/summary.json").read_text())
    assert [*summary["after"]["tasks"]] == ["go to the left", "go to the right"]
    assert summary["after"]["metrics"].keys() == {"distance", "effort"}
    page = Path("run/report.html").read_text()
    assert all(f'"id":"metric-env/metrics/{name}","title":"{name}"' in page for name in ("distance", "effort"))


def test_the_metrics_of_the_page_are_those_of_its_spec() -> None:
    shown: dict[str, object] = {}
    exec(snippets("python")[2], shown)
    spec, result = shown["spec"], shown["result"]
    assert isinstance(spec, EnvSpec)
    assert result.metrics.keys() == spec.metrics.keys()  # type: ignore[attr-defined]


def test_the_variants_of_the_page_are_changes_of_settings() -> None:
    shown: dict[str, Any] = {"Variant": Variant}
    exec(snippets("python")[1], shown)
    found = shown["variants"](SimpleNamespace(mass=1.5))
    assert found["heavy"].kind == "position"
    assert found["heavy"].settings == {"mass": 3.0}


def test_the_files_that_the_page_names_are_there() -> None:
    links = re.findall(r"\]\((\.\./[^)#]+)", PAGE)
    assert len(links) >= 4
    assert all((Path(__file__).parents[1] / "docs" / link).is_file() for link in links)
