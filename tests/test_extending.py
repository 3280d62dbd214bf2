"""The package of docs/extending.md is installed and used as its page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text(encoding="utf-8")
#: Language → the file's name in the block's first line, and the rest.
_BLOCK = re.compile(r"```(?:python|toml|yaml)\n# (\S+)\n(.*?)```", re.DOTALL)

Command = Callable[..., str]


@pytest.fixture(scope="module")
def polyrhythm(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Runs a command where the package is installed; returns what it printed."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "acme").mkdir()
    for name, content in _BLOCK.findall(PAGE):
        (folder / name).write_text(content)
    (folder / "acme" / "__init__.py").touch()
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    installed = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {address}" for name, address in points.items())]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*words: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "polyrhythm", *words]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.folder = folder  # type: ignore[attr-defined]
    return run


def test_names_and_settings_are_listed(polyrhythm: Command) -> None:
    assert "acme_line" in polyrhythm("envs")
    assert "Steps after which an episode is cut" in polyrhythm("envs", "acme_line")
    assert "acme_linear" in polyrhythm("policies")


def test_the_command_is_there(polyrhythm: Command) -> None:
    assert "print where the goal of an episode is" in polyrhythm("--help")
    assert polyrhythm("acme-goal", "3") == "-0.829\n"


def test_the_recipe_passes_check(polyrhythm: Command) -> None:
    assert "checks passed" in polyrhythm("check", "line.yaml", "launcher=inline")


def test_two_versions_are_trained(polyrhythm: Command) -> None:
    loss = "algorithm.loss={type: acme.loss:squared, uses_proximal: true}"
    polyrhythm("train", "line.yaml", "--out", "run", loss)
    folder: Path = polyrhythm.folder  # type: ignore[attr-defined]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "train/actor/distance" in line]) == 2
