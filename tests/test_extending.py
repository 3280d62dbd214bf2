"""The package of docs/extending.md is installed and used as its page says."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from polyrhythm.plugin import Kind
from polyrhythm.plugins.trackers.sink import Sink, TrackedRun

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


#: Name → words of a command that the page's reader may type.
COMMANDS = {
    "envs": ["envs"],
    "env": ["envs", "acme_line"],
    "policies": ["policies"],
    "help": ["--help"],
    "goal": ["acme-goal", "3"],
    "check": ["check", "line.yaml", "launcher=inline"],
    "refused": ["train", "line.yaml", "--check", "env.max_steps=2"],
    "typo": ["train", "line.yaml", "launcher=acme_nic"],
    "demonstrated": [
        *("train", "line.yaml", "--out", "run", "launcher=acme_nice", "supervised.steps=20"),
        "algorithm.loss={type: acme_squared, settings: {epsilon: 0.1}, uses_proximal: true}",
        "demonstrations={dataset: {format: acme_npz, folder: recorded}}",
    ],
    "tracked": [
        *("train", "line.yaml", "--out", "tracked", "launcher=inline", "training.versions=1"),
        "tracking=[{type: acme_lines, file: all.txt}]",
    ],
    "counted": ["train", "line.yaml", "--out", "counted", "launcher=acme_counted", "training.versions=1"],
    "engine": [
        *("train", "quickstart_lm", "--out", "lm", "env.terms=[2,3]", "env.max_new_tokens=8", "policy.layers=1"),
        *("policy.width=32", "policy.engine=acme_fresh", "rollout.rows=16", "groups.size=2"),
        *("training.mini_batch_samples=16", "training.versions=1", "demonstrations=null", "supervised=null"),
        *("evaluation.episodes=8", "launcher=inline"),
    ],
}
_PROGRAM = """
import json, sys
from polyrhythm.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        status = main(words)
    except SystemExit as error:
        status = error.code or 0
    print(f"<status {status}>", flush=True)
"""


def polyrhythm(package: Path, *commands: list[str]) -> list[str]:
    """Run commands one after another in a process where the package is installed; return what each printed, and its
    status in a line of its own."""
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-u", "-c", _PROGRAM, json.dumps(commands)],
        cwd=package,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return re.findall(r".*?<status -?\d+>\n", done.stdout, re.DOTALL)


@pytest.fixture(scope="module")
def said(package: Path) -> dict[str, str]:
    """What each of `COMMANDS` printed."""
    rng = np.random.default_rng(0)
    state = rng.uniform(-1, 1, (64, 2)).astype(np.float32)
    (package / "recorded").mkdir()
    np.savez(package / "recorded" / "steps.npz", state=state, actions=np.clip(state[:, 1:] - state[:, :1], -1, 1))
    found = dict(zip(COMMANDS, polyrhythm(package, *COMMANDS.values()), strict=True))
    for name, text in found.items():
        assert text.endswith("<status 2>\n" if name == "typo" else "<status 0>\n"), text
    return found


def test_names_and_settings_are_listed(said: dict[str, str]) -> None:
    assert "acme_line" in said["envs"]
    assert "Steps after which an episode is cut" in said["env"]
    assert "acme_linear" in said["policies"]


def test_the_calls_of_a_sink_are_those_of_the_page() -> None:
    calls = {name: call for name, call in vars(Sink).items() if inspect.isfunction(call)}
    assert calls
    for name, call in calls.items():
        parameters = str(inspect.signature(call)).replace("'", "").replace("self, ", "").removesuffix(" -> None")
        assert f"| `{name}{parameters}` |" in PAGE
    assert all(f"`{field.name}`" in PAGE or f"`run.{field.name}`" in PAGE for field in dataclasses.fields(TrackedRun))


def test_the_command_is_there(said: dict[str, str]) -> None:
    assert "print where the goal of an episode is" in said["help"]
    assert said["goal"] == "-0.829\n<status 0>\n"


def test_its_check_is_among_those_before_a_start(said: dict[str, str]) -> None:
    assert "time to the goal" in said["check"]
    assert "checks passed" in said["check"]
    assert "set it to 4 or more" in said["refused"]


@pytest.mark.usefixtures("said")
def test_two_versions_are_trained_from_its_demonstrations(package: Path) -> None:
    run = package / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len([line for line in lines if "train/actor/distance" in line]) == 2
    assert any("train/sft/loss" in line for line in lines)
    assert (run / "longest.txt").read_text() == "10 steps\n"
    assert "How many updates each run has." in (run / "report.html").read_text()


@pytest.mark.usefixtures("said")
def test_its_tracker_records_a_run(package: Path) -> None:
    lines = (package / "all.txt").read_text().splitlines()
    assert lines[0] == "run line-tracked"
    assert [line.split()[0] for line in lines[1:]] == ["metrics", "metrics", "metrics", "finished"]


def test_a_launcher_with_a_typo_is_answered_with_its_name(said: dict[str, str]) -> None:
    assert "launcher = 'acme_nic': did you mean acme_nice?" in said["typo"]


@pytest.mark.usefixtures("said")  # before its hooks are changed
def test_hooks_that_fail_in_the_end_leave_the_run_complete(package: Path) -> None:
    hooks = package / "acme" / "observer.py"
    hooks.write_text(hooks.read_text().replace('(folder / "longest.txt")', '(folder / "nowhere" / "longest.txt")'))
    words = ["train", "line.yaml", "--out", "failing", "training.versions=1", "launcher=inline"]
    (printed,) = polyrhythm(package, words)
    assert "Hooks failed after the run, which is complete" in printed
    assert (package / "failing" / "summary.json").is_file()


def test_its_weights_channel_carries_versions(said: dict[str, str]) -> None:
    assert "acme: version 1 has" in said["counted"]


@pytest.mark.usefixtures("said")
def test_its_engine_generates(package: Path) -> None:
    assert "type: acme_fresh" in (package / "lm" / "config.yaml").read_text()
    assert "train/actor/policy_loss" in (package / "lm" / "metrics.jsonl").read_text()


def test_every_kind_that_a_package_may_add_is_shown() -> None:
    blocks = dict(_BLOCK.findall(PAGE))
    named = set(re.findall(r"^ {8}\"(\w+)\": \{", blocks["acme/plugin.py"], re.MULTILINE))
    fixed = set(re.findall(r"`(\w+)`\s+\(`", PAGE[PAGE.index("More kinds connect") :]))
    assert named | fixed == set(get_args(Kind))
