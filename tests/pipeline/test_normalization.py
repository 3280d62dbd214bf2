"""Runs whose observations and rewards are normalised: gone on with, evaluated, and used without stations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.config.load import merge, validate
from polyrhythm.errors import RunFolderError
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import load_policy, save_policy
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.trained_policy import load_standalone
from polyrhythm.pipeline.validation.check import validate_run

NORMALISED = merge(LOCKSTEP, {"policy": {"normalize_observations": True}, "algorithm": {"normalize_rewards": True}})
COUNT = "flat.normalizer.count"


def trained(folder: Path, versions: int, **changes: Any) -> list[dict[str, Any]]:
    """Metrics of the updates of a run in the folder, which goes on there if it has begun."""
    settings = merge(NORMALISED, {"training": {"versions": versions}, **changes})
    folder.mkdir(exist_ok=True)
    train(validate_run(validate(settings)), folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line if name.startswith(("train/", "env/", "staleness/"))}
    return [{name: line[name] for name in names & line.keys()} for line in lines if "train/actor/lr" in line]


def test_a_run_in_two_parts_is_the_whole_run_bit_for_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    wanted = trained(whole, 4)
    trained(parts, 2)
    found = trained(parts, 4, resume=str(parts))
    del wanted[2]["train/actor/mismatch_kl"]  # a resumed trainer has not published what it begins with
    assert found == wanted
    assert len({line["train/critic/reward_scale"] for line in found}) == 4
    (_, one, _), (_, other, _) = load_policy(whole), load_policy(parts)
    assert one.keys() == other.keys()
    assert all(torch.equal(x, other[name]) for name, x in one.items())


def test_evaluations_leave_the_statistics_alone_and_use_them(tmp_path: Path) -> None:
    plain, evaluated = tmp_path / "plain", tmp_path / "evaluated"
    lines = trained(plain, 3)
    trained(evaluated, 3, evaluation={"episodes": 4, "every": 1, "weights": "pause"})
    _, weights, _ = load_policy(evaluated)
    assert weights[COUNT] == sum(10 * line["env/sample_chunk_steps"] for line in lines)
    assert torch.equal(weights["flat.normalizer.mean"], load_policy(plain)[1]["flat.normalizer.mean"])
    before = load_standalone(evaluated)
    states = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    actions = before.act({"state": states})
    evaluate(evaluated, 4)
    assert np.array_equal(load_standalone(evaluated).act({"state": states}), actions)
    settings, weights, version = load_policy(evaluated)
    weights["flat.normalizer.mean"] += 3.0
    save_policy(weights, settings, tmp_path / "others.pt", version)
    others = load_standalone(tmp_path / "others.pt")
    assert not np.array_equal(others.act({"state": states}), actions), "they matter"


def test_other_runs_begin_with_weights_and_statistics(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    trained(first, 2)
    _, weights, _ = load_policy(first)
    (line,) = trained(second, 1, init_from=str(first), seed=4)
    assert line["train/actor/mismatch_kl"] == pytest.approx(0.0, abs=1e-6), "its samples were made with statistics"
    _, later, _ = load_policy(second)
    assert later[COUNT] == weights[COUNT] + 10 * line["env/sample_chunk_steps"]
    with pytest.raises(RunFolderError, match=r"policy\.normalize_observations is false here but true in the policy"):
        trained(tmp_path / "third", 1, init_from=str(first), policy={"normalize_observations": False})
