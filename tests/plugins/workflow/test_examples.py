"""The examples of docs/workflows.md do what they promise, with every launcher the same."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.long import long
from tests.process.runs import ROOT, children, orphaned_folders

FOLDER = ROOT / "examples" / "own_workflow"
#: `tests/plugins/cluster/process/test_on_one_ray.py` has them with Ray by default.
RAY = pytest.param("ray", marks=long(15, "an example with a Ray of its own"))
LAUNCHERS = ["inline", "local", RAY]
#: Of the examples whose processes import torch.
SLOWER = ["inline", pytest.param("local", marks=long(4, "an example in processes")), RAY]


def load(name: str, launcher: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if launcher == "ray":
        pytest.importorskip("ray", reason="the ray extra is not installed")
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def settings(launcher: str) -> dict[str, Any]:
    """On Ray the example's folder goes to the nodes, as a user's would."""
    return {"ray": {"cpus_per_station": 0.25, "working_dir": str(FOLDER)}} if launcher == "ray" else {}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not children()
    assert not orphaned_folders()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_pipeline_learns_and_equally_everywhere(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_pipeline(launcher, monkeypatch)


def check_pipeline(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    example = load("pipeline", launcher, monkeypatch)
    history = example.run(launcher, **settings(launcher))
    assert len(history) == example.ROUNDS
    assert history == pytest.approx(example.run("inline"))
    assert history[-1] > history[0] + 1.5


@pytest.mark.parametrize("launcher", SLOWER)
def test_the_reward_model_scores_every_answer_and_equally_everywhere(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_reward_model(launcher, monkeypatch, capsys)


def check_reward_model(launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = load("reward_model", launcher, monkeypatch)
    advantages = example.run(launcher, **settings(launcher))
    told = capsys.readouterr().out
    written, read = (sum(map(int, part.strip("[]").split(", "))) for part in words(told))
    assert written == read > example.PROMPTS * example.ANSWERS
    assert sorted(advantages) == list(range(example.PROMPTS))
    expected = example.run("inline")
    for prompt, own in advantages.items():
        assert len(own) == example.ANSWERS
        assert own == pytest.approx(expected[prompt])
        assert sum(own) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("launcher", SLOWER)
def test_rollout_and_learner_take_turns_and_learn_equally_everywhere(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("one_device", launcher, monkeypatch)
    history = example.run(launcher, **settings(launcher))
    told = capsys.readouterr().out.splitlines()
    for name, line in zip(("rollout-0", "learner-0"), told, strict=False):
        known = re.fullmatch(rf"{name}: (\d+) switches, ([0-9.]+) MB moved, (\d+) items on the device", line)
        assert known
        assert int(known[1]) >= 2 * (example.ROUNDS - 1)
        assert float(known[2]) >= 0.2
        assert int(known[3]) == (0 if launcher == "inline" else example.ROUNDS)
    assert len(history) == example.ROUNDS
    assert history[-1] > 3 * history[0]
    if launcher != "inline":
        assert history == pytest.approx(example.run("inline"), abs=1e-3)


def words(told: str) -> list[str]:
    """The two lists in `words written: [1, 2], read: [2, 1]`."""
    _, written, read = told.splitlines()[0].split(": ")
    return [written.removesuffix(", read"), read]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_the_examples_are_short(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) < 100
    assert max(map(len, lines)) <= 120
