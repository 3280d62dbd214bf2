"""Evaluation during training in real runs: of one version each, beside training, and the best policy stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.runs import config

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError
from polyrhythm.flow import records as r
from polyrhythm.pipeline.beside import EvaluationsBeside
from polyrhythm.pipeline.best import BEST_FILE, BestPolicies
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.check import check
from polyrhythm.pipeline.checkpoints import STATES, load_policy, save_policy
from polyrhythm.pipeline.episodes import held_out, tally
from polyrhythm.pipeline.run import train

WAYS = ("second_copy", "own_generator", "pause")
EVALUATION = {"every": 2, "every_episodes": 5, "rows": 3, "seed": 7}


def run(folder: Path, **evaluation: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    checked = check(config(evaluation={**EVALUATION, **evaluation}, training={"versions": 6}))
    return train(checked, folder)


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "evaluations.json").read_text())
    return found


@pytest.mark.parametrize("weights", WAYS[:2])
def test_a_lockstep_run_learns_the_same_with_and_without(weights: str, tmp_path: Path) -> None:
    alone, with_it = tmp_path / "alone", tmp_path / "with"
    run(alone, every=0)
    summary = run(with_it, weights=weights)
    first, second = load_policy(alone)[1], load_policy(with_it)[1]
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert summary["ledger"]["started"] == summary["ledger"]["trained"] == 60
    assert listed(with_it)


@pytest.mark.parametrize("weights", WAYS)
def test_every_evaluation_is_of_one_version_and_in_metrics_list_and_best(weights: str, tmp_path: Path) -> None:
    summary = run(tmp_path, weights=weights, episodes=4, sampled=True)
    entries = listed(tmp_path)
    versions = [entry["version"] for entry in entries]
    assert versions[-1] == 6, "the evaluation after training competes"
    assert all(later - earlier >= 2 for earlier, later in zip([0, *versions], versions[:-1], strict=False))
    assert [sorted(entry) for entry in entries] == [["during", "during_sampled", "version"]] * len(entries)
    assert [entry["during"]["episodes"] for entry in entries] == [5] * (len(entries) - 1) + [4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [line["step"] for line in lines if "evaluation/greedy/rate" in line]
    assert measured == [0, *versions]
    best = max(entries, key=lambda entry: (entry["during"]["low"], entry["during"]["mean_return"]))
    assert summary["best"] == best
    assert load_policy(tmp_path / BEST_FILE)[2] == best["version"]
    assert [path.name for path in (tmp_path / STATES).glob("policy-*")] == [f"policy-{best['version']:06d}.pt"]


@pytest.mark.parametrize("weights", WAYS)
def test_an_evaluation_gets_what_its_version_alone_earns(weights: str, tmp_path: Path) -> None:
    """The kept policy, evaluated again with all else at rest, earns the same."""
    run(tmp_path, weights=weights)
    entry = listed(tmp_path)[0]
    best = BestPolicies(tmp_path, 9).path(entry["version"])
    settings = config(evaluation=EVALUATION)
    if not best.is_file():
        best = tmp_path / BEST_FILE
        entry = next(e for e in listed(tmp_path) if e["version"] == load_policy(best)[2])
    _, weights_of, version = load_policy(best)
    pipeline = build_pipeline(settings, version=version, trainer=False, start=False)
    pipeline.weights.publish(version, weights_of)
    pipeline.loop.start()
    results = pipeline.loop.evaluate("again", held_out(5, 7, 1, greedy=True))
    pipeline.close()
    assert {result.version for result in results} == {version}
    assert tally(results, check(settings).spec.tasks)["mean_return"] == pytest.approx(entry["during"]["mean_return"])


def test_an_evaluation_that_is_given_up_is_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = build_pipeline(config(evaluation=EVALUATION), folder=tmp_path)
    told: list[int] = []
    best = BestPolicies(tmp_path, 1)
    episodes = [r.Episode(0, 0, seed, greedy=True) for seed in range(3)]
    beside = EvaluationsBeside(
        config(evaluation=EVALUATION), pipeline, best, episodes, lambda version, results: told.append(version)
    )
    ticket = r.Ticket(-1, -1, 0, 0, 0, 0, version=0, evaluation="during-0")
    beside._ask(0)
    beside.decided(0.0, r.Wake(), [r.StartRows("s", "e/0", (r.Grant(0, ticket),))])
    assert best.path(0).is_file()
    beside.decided(0.0, r.Wake(), [r.EvaluationDone("during-0", 1, 2)])
    pipeline.close()
    assert told == []
    assert not best.path(0).exists()
    assert "the evaluation of version 0 is given up: 0 of its 3 episodes ended" in caplog.text


def tally_of(low: float, mean_return: float) -> dict[str, dict[str, Any]]:
    return {"during": {"low": low, "mean_return": mean_return}}


def filled(folder: Path, keep: int) -> BestPolicies:
    """Versions 2, 4, 6, 8, of which 6 is the best by its lower end, then 8 and 4 by their returns."""
    best = BestPolicies(folder, keep)
    (folder / STATES).mkdir()
    for version, low, mean_return in ((2, 0.1, 9.0), (4, 0.3, 1.0), (6, 0.5, 0.0), (8, 0.3, 2.0)):
        save_policy({}, config(), best.path(version), version)
        best.add(version, tally_of(low, mean_return))
    return best


def kept(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("policy-")) for path in (folder / STATES).glob("policy-*.pt"))


@pytest.mark.parametrize(("keep", "stay"), [(1, [6]), (2, [6, 8]), (3, [4, 6, 8])])
def test_the_best_by_lower_end_then_return_stay(keep: int, stay: list[int], tmp_path: Path) -> None:
    best = filled(tmp_path, keep)
    assert kept(tmp_path) == stay
    assert best.best() == {"version": 6, **tally_of(0.5, 0.0)}
    assert load_policy(tmp_path / BEST_FILE)[2] == 6
    assert [entry["version"] for entry in listed(tmp_path)] == [2, 4, 6, 8]


def test_a_run_that_goes_back_forgets_what_it_measured_later(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    again = BestPolicies(tmp_path, 3)
    again.rewind(5)
    assert [entry["version"] for entry in listed(tmp_path)] == [2, 4]
    assert kept(tmp_path) == [4]
    assert load_policy(tmp_path / BEST_FILE)[2] == 4
    again.rewind(0)
    assert not (tmp_path / BEST_FILE).exists()
    assert again.best() is None


def settings(**evaluation: Any) -> RunConfig:
    return config(evaluation=evaluation)


@pytest.mark.parametrize(
    ("evaluation", "told"),
    [
        ({"every": 2}, "evaluation.every = 2: it needs episodes; set every_episodes or episodes"),
        ({"every": 2, "every_episodes": 3, "greedy": False}, "evaluation.every = 2: neither greedy nor sampled"),
        ({"every": 2, "every_episodes": 3, "rows": 0}, "evaluation.rows = 0: it must be at least 1"),
        ({"every": 2, "every_episodes": 3, "weights": "none"}, "evaluation.weights = 'none'"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(evaluation: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(**evaluation)
