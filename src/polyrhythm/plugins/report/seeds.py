"""Runs that differ only in their seed: groups of them, and their mean curve with its range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from polyrhythm.plugins.report.read import Run

#: Settings in which runs of one group may differ: the seed, and where the run is.
_FREE = ("seed", "name", "out_dir", "resume")
#: Points of a mean curve.
_POINTS = 60


def seed_groups(runs: Sequence[Run]) -> dict[int, list[Run]] | None:
    """Place of its first run, whose colour a group has -> runs with equal settings; None if no two of them differ only
    in the seed."""
    places: dict[tuple[tuple[str, str], ...], int] = {}
    groups: dict[int, list[Run]] = {}
    for place, run in enumerate(runs):
        settings = tuple(sorted((key, value) for key, value in run.settings.items() if key not in _FREE))
        groups.setdefault(places.setdefault(settings, place), []).append(run)
    return groups if len(groups) < len(runs) else None


def group_label(group: Sequence[Run]) -> str:
    """`runs/a, seeds 0, 1, 2`; of one run its label."""
    if len(group) == 1:
        return group[0].label
    return f"{group[0].label}, seeds {', '.join(run.settings.get('seed', '?') for run in group)}"


def over_seeds(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float, float, float]]:
    """Points (x, mean, lowest, highest) over curves of ascending x, linearly interpolated where all of them are."""
    if not curves:
        return []
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if last < first:
        return []
    places = np.linspace(first, last, _POINTS)
    values = np.array([np.interp(places, *np.transpose(curve)) for curve in curves])
    return list(zip(*(a.tolist() for a in (places, values.mean(0), values.min(0), values.max(0))), strict=True))
