"""Comparisons of runs that differ only in their seed: one curve with its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyrhythm.plugins.report.charts import returns
from polyrhythm.plugins.report.data import page_data
from polyrhythm.plugins.report.read import Run, group_label, over_seeds, seed_groups


def run(label: str, seed: int, earned: list[float], **settings: Any) -> Run:
    lines = [
        {
            "step": number,
            "throughput/transitions_per_s": 1.0,
            "throughput/transitions": 100.0 * (number + 1),
            "env/episodes": 40,
            "env/return": value,
        }
        for number, value in enumerate(earned)
    ]
    config = "\n".join(f"{name}: {value}" for name, value in {"seed": seed, "name": label, **settings}.items())
    return Run(Path(label), label, config, lines, [], {}, finished=True)


def test_runs_are_grouped_by_equal_settings_but_the_seed() -> None:
    runs = [run("a", 0, [1, 2]), run("b", 0, [1, 2], gamma=0.9), run("c", 1, [3, 4])]
    groups = seed_groups(runs)
    assert groups is not None
    assert {place: [one.label for one in group] for place, group in groups.items()} == {0: ["a", "c"], 1: ["b"]}
    assert [group_label(group) for group in groups.values()] == ["a, seeds 0, 1", "b"]
    assert seed_groups(runs[:2]) is None


def test_the_curve_over_seeds_is_their_mean_and_range_where_all_of_them_are() -> None:
    points = over_seeds([[(0, 0.0), (10, 10.0)], [(5, 1.0), (20, 1.0)]])
    assert (points[0], points[-1]) == ((5.0, 3.0, 1.0, 5.0), (10.0, 5.5, 1.0, 10.0))
    assert over_seeds([[(0, 1.0)], [(5, 1.0)]]) == []
    assert over_seeds([]) == []


def test_a_comparison_begins_with_what_differs_and_draws_a_band_over_seeds() -> None:
    runs = [run("a", 0, [1, 2]), run("b", 1, [3, 4]), run("c", 0, [0, 1], gamma=0.5)]
    _, chart = returns(runs)
    group, alone = chart["series"]
    assert (group["label"], alone["label"]) == ("a, seeds 0, 1", "c")
    assert (group["low"][0], group["y"][0], group["high"][0]) == (1.0, 2.0, 3.0)
    data = page_data(runs)
    assert [(one["colour"], one["dash"]) for one in data["runs"]] == [(0, 0), (0, 1), (1, 0)]
    ids = [section["id"] for section in data["sections"]]
    assert ids.index("settings") < ids.index("return")
