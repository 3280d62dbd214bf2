"""Runs that differ only in their seed: groups, results and curves with intervals over seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.observe.intervals import success_rate, wilson
from polyrhythm.observe.metrics import MetricsWriter
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.read import Run, read_run
from polyrhythm.plugins.report.seeds import comparison, over_seeds, points_over_seeds, seed_groups

Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write and read a run; successes: of 40 episodes after training; None: success is not reported."""

    def write(name: str, seed: int, successes: int | None, lr: float = 0.1, **summary: Any) -> Run:
        folder = tmp_path / name
        each = [None if successes is None else i < successes for i in range(40)]
        after = {**success_rate(each), "mean_return": 1.0 + seed}
        with MetricsWriter(folder) as metrics:
            for update in range(6):
                values = {
                    "env/episodes": 40.0,
                    "env/success_once": None if successes is None else (update + seed) / 10,
                    "env/return": float(update),
                    "throughput/transitions": 100.0 * (update + 1) + seed,
                    "throughput/transitions_per_s": 10.0,
                }
                metrics.log(update, values, 5.0 * (update + 1))
            metrics.log(6, {f"evaluation/greedy/{k}": after[k] for k in ("rate", "low", "high", "mean_return")}, 40.0)
        (folder / "config.yaml").write_text(f"seed: {seed}\nname: {name}\ntraining:\n  optimizer:\n    lr: {lr}\n")
        (folder / "summary.json").write_text(json.dumps({"after": after, "transitions_per_s": 10.0 + seed, **summary}))
        return read_run(folder)

    return write


@pytest.mark.parametrize(
    ("more", "together"),
    [
        ("demonstrations:\n  seed: {}\n", True),
        ("demonstrations:\n  episodes: {}\n", False),
        ("evaluation:\n  seed: {}\n", False),
        ("env:\n  seed: {}\n", False),
    ],
)
def test_the_seed_of_the_demonstrations_is_one_of_the_seeds(make: Make, more: str, together: bool) -> None:
    runs = []
    for seed in range(2):
        folder = make(str(seed), seed, 20).folder
        with (folder / "config.yaml").open("a") as file:
            file.write(more.format(seed + 10))
        runs.append(read_run(folder))
    assert len(seed_groups(runs)) == (1 if together else 2)


def test_runs_with_equal_settings_are_one_group(make: Make) -> None:
    runs = [make("a0", 0, 20), make("b0", 0, 10, lr=0.2), make("a1", 1, 30)]
    assert [[run.folder.name for run in group] for group in seed_groups(runs)] == [["a0", "a1"], ["b0"]]
    found = comparison(runs)
    assert found["settings"] == {"training.optimizer.lr": ["0.1", "0.2"]}
    assert [group["label"] for group in found["groups"]] == ["optimizer.lr 0.1", "optimizer.lr 0.2"]
    assert [group["seeds"] for group in found["groups"]] == [["0", "1"], ["0"]]
    json.dumps(found, allow_nan=False)
    data = page_data(runs)
    assert [(one["colour"], one["dash"]) for one in data["runs"]] == [(0, 0), (1, 0), (0, 1)]
    sections = {section["id"]: section["parts"] for section in data["sections"]}
    curves = next(part for part in sections["curves"] if part.get("id") == "seeds-success-time")["series"]
    assert [(one["label"], len(one["low"]) > 1) for one in curves[:2]] == [
        ("optimizer.lr 0.1, 2 seeds", True),
        ("optimizer.lr 0.2", False),
    ]


def test_success_has_an_interval_over_seeds(make: Make) -> None:
    runs = [make(f"a{seed}", seed, successes) for seed, successes in enumerate((28, 32, 36))]
    (group,) = comparison(runs)["groups"]
    success = group["results"]["after"]["success"]
    assert success["mean"] == pytest.approx(0.8)
    assert success["each"] == [0.7, 0.8, 0.9]
    assert success["low"] == pytest.approx(0.8 - 4.302653 * 0.1 / 3**0.5)
    assert success["high"] == 1.0, "a rate ends there"
    assert (success["successes"], success["episodes"]) == (96, 120)
    assert group["results"]["after"]["return"]["mean"] == 2.0
    assert group["numbers"]["transitions_per_s"]["each"] == [10.0, 11.0, 12.0]


def test_seeds_that_agree_by_chance_keep_the_interval_of_their_episodes(make: Make) -> None:
    for successes in (40, 0):
        runs = [make(f"a{seed}-{successes}", seed, successes) for seed in range(3)]
        success = comparison(runs)["groups"][0]["results"]["after"]["success"]
        pooled = wilson(3 * successes, 120)
        assert (success["low"], success["high"]) == (pooled.low, pooled.high)


def test_one_seed_has_the_interval_of_its_episodes_and_no_mean_curve(make: Make) -> None:
    (group,) = comparison([make("a", 0, 30)])["groups"]
    assert group["results"]["after"]["success"]["low"] == wilson(30, 40).low
    assert group["results"]["after"]["return"]["low"] is None
    curve = group["curves"]["transitions"]["success"]
    assert curve["x"] == []
    assert curve["each"][0]["y"] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_without_reported_success_returns_are_compared(make: Make) -> None:
    (group,) = comparison([make("a", 0, None), make("b", 1, None)])["groups"]
    assert "success" not in group["results"]["after"]
    assert "success" not in group["curves"]["transitions"]
    assert group["curves"]["time"]["return"]["each"][1]["x"] == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0]


def test_curves_are_means_where_all_seeds_are_defined() -> None:
    found = over_seeds([[(0, 0.0), (10, 1.0)], [(5, 0.5), (20, 0.5)]], (0.0, 1.0))
    assert (found["x"][0], found["x"][-1]) == (5.0, 10.0)
    assert found["mean"][-1] == pytest.approx(0.75)
    assert (found["low"][-1], found["high"][-1]) == (0.0, 1.0)
    assert over_seeds([[(0, 0.0), (1, 1.0)], [(2, 0.0), (3, 1.0)]])["x"] == [], "no common range"
    assert over_seeds([[(1, 0.0)], [(1, 1.0)]])["mean"] == [0.5]
    assert over_seeds([])["each"] == []


def test_the_nth_evaluations_of_seeds_are_one_point() -> None:
    found = points_over_seeds([[(0, 0.2), (10, 0.8), (20, 1.0)], [(0, 0.2), (14, 0.6)]])
    assert found["x"] == [0.0, 12.0]
    assert found["mean"] == pytest.approx([0.2, 0.7])
    assert found["low"][0] == pytest.approx(0.2)
    assert found["high"][1] == pytest.approx(0.7 + 12.706205 * 0.1)
    assert points_over_seeds([[(0, 0.2)], []])["x"] == []
