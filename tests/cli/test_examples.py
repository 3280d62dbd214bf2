"""What the examples folder promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    assert "\nstations    none lost\n" in shown


def learned(folder: Path) -> dict[str, Any]:
    """The run's summary, and its metrics by update."""
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**summary, "updates": [line for line in lines if "throughput/transitions" in line], "lines": lines}


def test_a_vector_environment_learns_and_its_metrics_are_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES / "own_vector_env")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_vector_env"))
    folder = tmp_path / "run"
    assert main(["train", "rail.yaml", "--out", str(folder), "launcher=inline", "training.versions=8"]) == 0
    run = learned(folder)
    assert run["after"]["low"] > run["before"]["high"]
    for name in ("distance", "energy"):
        assert all(line[f"env/metrics/{name}"] >= 0 for line in run["updates"])
        assert scalars(folder, f"env/metrics/{name}") == pytest.approx(
            [line[f"env/metrics/{name}"] for line in run["updates"]]
        )
        key = f"evaluation/greedy/metrics/{name}"
        measured = [line[key] for line in run["lines"] if key in line]
        assert measured == [run["before"]["metrics"][name], run["after"]["metrics"][name]]
    assert run["after"]["metrics"]["distance"] < run["before"]["metrics"]["distance"]
    assert "The environment's own metrics" in (folder / "report.html").read_text()


def test_a_text_environment_is_one_file_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "own_text_env")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_text_env"))
    folder = tmp_path / "run"
    assert len((EXAMPLES / "own_text_env" / "initials.py").read_text().splitlines()) < 40
    assert main(["train", "initials.yaml", "--out", str(folder), "launcher=inline", "training.versions=3"]) == 0
    run = learned(folder)
    assert run["before"]["low"] > 0.5, "by imitation"
    assert all(1 <= line["env/metrics/message_tokens"] <= 4 for line in run["updates"])


def scalars(folder: Path, name: str) -> list[float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), {"tensors": 0})
    events.Reload()
    return [event.tensor_proto.float_val[0] for event in events.Tensors(name)]


def test_a_policy_of_ones_own_learns_in_the_environment_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    recipe, few = "examples/own_policy/bounded.yaml", ["training.versions=10", "evaluation.every=0"]
    assert main(["train", recipe, "--out", str(tmp_path / "run"), "launcher=inline", *few]) == 0
    run = learned(tmp_path / "run")
    assert run["after"]["mean_return"] > run["before"]["mean_return"] + 3


def test_the_policy_of_ones_own_is_short() -> None:
    lines = (EXAMPLES / "own_policy" / "bounded.py").read_text().splitlines()
    assert 0 < len(lines) < 60
    assert max(map(len, lines)) <= 120


def test_a_loss_and_an_advantage_of_ones_own_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES / "own_loss")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_loss"))
    few = ["training.versions=8", "evaluation.episodes=16"]
    assert main(["train", "objective.yaml", "--out", str(tmp_path / "run"), "launcher=inline", *few]) == 0
    run = learned(tmp_path / "run")
    assert run["after"]["mean_return"] > 2 * run["before"]["mean_return"]
    assert all(line["train/actor/distance"] > 0 for line in run["updates"])


@pytest.mark.parametrize(
    ("recipe", "key", "told"),
    [
        ("own_env/point.yaml", "env.step_sice=3", "env.step_sice = 3: no such key; did you mean step_size?"),
        ("own_vector_env/rail.yaml", "env.forse=3", "env.forse = 3: no such key; did you mean force?"),
        ("own_policy/bounded.yaml", "policy.hiden=3", "policy.hiden = 3: no such key; did you mean hidden?"),
        ("own_loss/objective.yaml", "algorithm.loss.settings.eps=3", "settings.eps = 3: objective:quadratic takes"),
    ],
)
def test_the_examples_refuse_a_key_that_is_not_theirs(
    recipe: str, key: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.syspath_prepend(str((EXAMPLES / recipe).parent))
    assert main(["train", str(EXAMPLES / recipe), key, "launcher=inline"]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "here"),
    [
        ("own_env/point.yaml", True),
        ("own_text_env/initials.yaml", True),
        ("prompts/sums.yaml", True),
        ("own_vector_env/rail.yaml", True),
        ("own_policy/bounded.yaml", False),
        ("own_loss/objective.yaml", True),
        ("own_reward/brief.yaml", True),
    ],
)
def test_the_examples_pass_every_check(
    recipe: str, here: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the folder that each recipe names: its own (`here`), or the repository's root."""
    folder, name = (EXAMPLES / recipe).parent, Path(recipe).name
    monkeypatch.chdir(folder if here else EXAMPLES.parent)
    monkeypatch.syspath_prepend(str(folder))
    assert main(["check", name if here else f"examples/{recipe}", "launcher=inline", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    others = [(check["name"], check["state"]) for check in told["checks"] if check["state"] != "ok"]
    assert others == ([("success", "note")] if "own_loss" in recipe else []), "it trains in CartPole, which has none"


def test_a_reward_function_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a message costs is in the return, and no message costs more than its longest."""
    monkeypatch.chdir(EXAMPLES / "own_reward")
    monkeypatch.syspath_prepend(str(EXAMPLES / "own_reward"))
    folder = tmp_path / "run"
    small = ["env.terms=[2,2]", "rollout.rows=16", "rollout.sharding=whole", "training.mini_batch_samples=16"]
    small += ["training.versions=2", "evaluation.episodes=32", "demonstrations.episodes_per_task=500"]
    small += ["supervised.steps=150", "policy.layers=2", "policy.width=32"]
    assert main(["train", "brief.yaml", "--out", str(folder), "launcher=inline", *small]) == 0
    run = learned(folder)
    assert run["after"]["rate"] > 0, "some answers are right"
    assert run["after"]["mean_return"] < run["after"]["rate"], "and cost something"
    scores = [line["env/sample_score"] for line in run["updates"]]
    assert all(-1.28 <= score <= 0 for score in scores)
    assert min(scores) < 0


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
