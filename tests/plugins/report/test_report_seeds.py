"""Comparisons of runs that differ only in their seed: one curve with its range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyrhythm.plugins.report.figures import returns
from polyrhythm.plugins.report.page import page
from polyrhythm.plugins.report.read import Run, group_label, over_seeds, seed_groups


def run(label: str, seed: int, earned: list[float], **settings: Any) -> Run:
    lines = [
        {
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
    figure = returns(runs)
    assert figure is not None
    assert figure.pictures[0].count('class="band') == 1
    assert [text for _, text in figure.legend][:2] == ["a, seeds 0, 1", "c"]
    text = page(runs)
    assert text.index("Settings that differ") < text.index("Mean return over transitions")


@pytest.mark.parametrize("value", [0.001234, 123456.0, 1.0])
def test_the_title_of_an_axis_stands_left_of_its_labels(value: float) -> None:
    figure = returns([run("a", 0, [value, 2 * value])])
    assert figure is not None
    labels = [part for part in figure.pictures[0].split("<text") if 'class="tick end"' in part]
    for label in labels:
        end, text = float(label.partition('x="')[2].partition('"')[0]), label.partition(">")[2].partition("<")[0]
        assert end - 7 * len(text) >= 20
