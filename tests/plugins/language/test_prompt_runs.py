"""Prompts from files, trained: two updates with each verifier, and a run that is cut in the middle of an epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.long import long

from polyrhythm.config.load import load_config, validate
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.language.text.prompts import Answering, PromptsSettings
from polyrhythm.specs import SampleView, Score
from polyrhythm.training.checkpoint import load_state

EXAMPLE = Path(__file__).parents[3] / "examples" / "prompts" / "sums.jsonl"
#: Prompts that were begun, in order.
begun: list[str] = []


class SeenSettings(PromptsSettings):
    """Prompts that keep what they begin."""

    type: Literal["tests.plugins.language.test_prompt_runs:SeenSettings"]  # type: ignore[assignment]

    def conversation(self) -> Answering:
        return Seen(self)


class Seen(Answering):
    def begin(self, task: int, seed: int) -> str:
        begun.append(super().begin(task, seed))
        return begun[-1]


def judge(sample: SampleView) -> Score:
    """A reward function that needs the data's own answer."""
    assert sample.reference == str(eval(sample.prompt.rstrip("=")))
    return Score(reward=0.5 * len(sample.reference), success=True)


def recipe(**env: Any) -> dict[str, Any]:
    return {
        "name": "prompts",
        "launcher": "inline",
        "env": {"type": "prompts", "files": str(EXAMPLE), "held_out": 0.2, "max_prompt_tokens": 8, **env},
        "policy": {"type": "causal_lm", "layers": 1, "width": 16, "heads": 2, "hidden": 16},
        "rollout": {"rows": 8},
        "groups": {"size": 4},
        "training": {"versions": 2, "mini_batch_samples": 16},
        "algorithm": {"advantage": "grpo", "value": {"coef": 0.0}},
        "evaluation": {"episodes": 0},
    }


def run(folder: Path, content: dict[str, Any], *overrides: str) -> dict[str, Any]:
    (folder / "recipe.yaml").write_text(json.dumps(content))
    checked = validate_run(load_config(str(folder / "recipe.yaml"), list(overrides)))
    begun.clear()
    (folder / "run").mkdir(exist_ok=True)
    return train(checked, folder / "run")


@pytest.mark.parametrize(
    ("verify", "launcher"),
    [
        ("exact", "inline"),
        pytest.param({"type": "regex", "pattern": r"\d+"}, "local", marks=long(11, "with processes")),
        pytest.param("math", "inline", marks=long(5, "with a parser of formulas")),
    ],
    ids=["exact", "regex", "math"],
)
def test_two_updates_on_the_example(verify: Any, launcher: str, tmp_path: Path) -> None:
    if verify == "math":
        pytest.importorskip("math_verify")
    content = recipe(verify=verify, max_new_tokens=12) | {
        "launcher": launcher,
        "evaluation": {"episodes": 4},
        "demonstrations": {"episodes_per_task": 32},
        "supervised": {"steps": 120, "batch_size": 16, "lr": 1e-2},
    }
    summary = run(tmp_path, content)
    assert summary["ledger"]["trained"] == 32
    assert summary["after"]["episodes"] == 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    updates = [line for line in lines if "env/success_once" in line]
    assert max(line["env/success_once"] for line in updates) > 0, "by imitation"
    assert {line["env/metrics/verifier_failed"] for line in updates} == {0.0}


def test_a_run_cut_within_an_epoch_goes_on_with_the_same_rows(tmp_path: Path) -> None:
    content = recipe(type="tests.plugins.language.test_prompt_runs:SeenSettings", max_new_tokens=2)
    rows = []
    for name, cuts in (("whole", (7,)), ("cut", (2, 7))):
        (tmp_path / name).mkdir()
        rows.append(list[str]())
        for number, versions in enumerate(cuts):
            resume = [f"resume={tmp_path / name / 'run'}"] if number else []
            run(tmp_path / name, content, "preset=lockstep", f"training.versions={versions}", *resume)
            rows[-1] += begun
    assert rows[0] == rows[1]
    assert len(rows[0]) == 7 * 16
    epoch = SeenSettings(**content["env"]).spec().training_states
    assert 2 * 4 < epoch < 7 * 4, "the cut is within the first epoch, the end within a later one"
    assert set(Counter(rows[0][: 4 * epoch]).values()) == {4}, "each row once, in a group of four"
    first, second = (load_state(tmp_path / name / "run" / "policy.pt")["policy"] for name in ("whole", "cut"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_whose_data_changed_is_not_resumed(tmp_path: Path) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text(EXAMPLE.read_text())
    content = recipe(files=str(data), max_new_tokens=2)
    run(tmp_path, content, "training.versions=1")
    data.write_text(EXAMPLE.read_text().replace('"answer": "9"', '"answer": "8"'))
    with pytest.raises(RunFolderError, match=r"env: the data changed since the run in .* was trained; restore"):
        run(tmp_path, content, "training.versions=2", f"resume={tmp_path / 'run'}")
    data.write_text(EXAMPLE.read_text())
    assert run(tmp_path, content, "training.versions=2", f"resume={tmp_path / 'run'}")["ledger"]["trained"] == 32


def test_a_reward_function_gets_the_datas_own_answer(tmp_path: Path) -> None:
    content = recipe(verify="none", max_new_tokens=4) | {"scoring": {"function": f"{__name__}:judge"}}
    summary = run(tmp_path, content | {"evaluation": {"episodes": 2}})
    assert summary["ledger"]["trained"] == 32
    assert (summary["after"]["rate"], summary["after"]["mean_return"]) == (1.0, 0.5)


def test_more_episodes_than_prompts_held_out_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    short = recipe(max_new_tokens=2)
    states = PromptsSettings(**short["env"]).spec().initial_states
    for episodes, warned in ((states, 0), (states + 1, 1)):
        caplog.clear()
        validate_run(validate(short | {"evaluation": {"episodes": episodes}}))
        assert len([one for one in caplog.records if f"hold out {states}, which" in one.message]) == warned
