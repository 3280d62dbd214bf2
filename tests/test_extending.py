"""The package of docs/extending.md is installed and used as its page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
#: Name of a file in the first line of a block, and the other lines.
_BLOCK = re.compile(r"```(?:python|toml|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the package and what an installation writes beside it."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "acme").mkdir()
    (folder / "acme" / "__init__.py").touch()
    for name, content in _BLOCK.findall(PAGE):
        (folder / name).write_text(content)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: {name}\nVersion: {version}\n".format_map(project))
    ((group, points),) = project["entry-points"].items()
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *(f"{k} = {points[k]}" for k in points)]))
    return folder


def polyrhythm(package: Path, *words: str, status: int = 0) -> str:
    """Run a command where the package is installed; return what it printed."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "polyrhythm", *words],
        cwd=package,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_names_and_settings_are_listed(package: Path) -> None:
    assert "acme_line" in polyrhythm(package, "envs")
    assert "Steps after which an episode is cut" in polyrhythm(package, "envs", "acme_line")
    assert "acme_linear" in polyrhythm(package, "policies")


def test_the_command_is_there(package: Path) -> None:
    assert "print where the goal of an episode is" in polyrhythm(package, "--help")
    assert polyrhythm(package, "acme-goal", "3") == "-0.829\n"


def test_the_recipe_passes_check(package: Path) -> None:
    assert "checks passed" in polyrhythm(package, "check", "line.yaml", "launcher=inline")


def test_its_check_is_a_row_of_the_list(package: Path) -> None:
    said = polyrhythm(package, "check", "line.yaml", "launcher=inline")
    assert "✓ goals                         8 of 48 goals" in said
    assert "✓ goals" in polyrhythm(package, "train", "line.yaml", "--check", "launcher=inline")
    said = polyrhythm(package, "train", "line.yaml", "launcher=inline", "rollout.rows=49", status=2)
    assert "rollout.rows = 49: there are 48 goals; use at most 48" in said
    assert "goals" not in polyrhythm(package, "train", "cartpole", "--check", "launcher=inline")


def test_two_versions_are_trained_and_observed_under_its_launcher(package: Path) -> None:
    loss = "algorithm.loss={type: acme_squared, uses_proximal: true}"
    said = polyrhythm(package, "train", "line.yaml", "--out", "run", loss, "launcher=acme_here")
    assert "stations: simulator-0 generator-0 trainer" in said
    assert said.count("an update is done") == 2
    assert "evaluation before, version 0: return -" in said
    assert "evaluation after, version 2: return -" in said
    assert (package / "run" / "acme.txt").read_text() == "complete"
    lines = [json.loads(line) for line in (package / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "train/actor/distance" in line]) == 2


def test_a_launcher_with_a_typo_is_answered_with_its_name(package: Path) -> None:
    said = polyrhythm(package, "train", "line.yaml", "launcher=acme_her", status=2)
    assert "launcher = 'acme_her': did you mean acme_here?" in said


def test_hooks_that_fail_in_the_end_leave_the_run_complete(package: Path) -> None:
    hooks = package / "acme" / "observing.py"
    hooks.write_text(hooks.read_text().replace('(folder / "acme.txt")', '(folder / "nowhere" / "acme.txt")'))
    said = polyrhythm(package, "train", "line.yaml", "--out", "run-2", "training.versions=1", "launcher=acme_here")
    assert "Hooks failed after the run, which is complete" in said
    assert (package / "run-2" / "summary.json").is_file()
