"""Aggregates runs that differ only in their seed: means and 95% intervals over seeds, of results and of curves.

The interval over seeds is Student's, so it says how another seed would do. That of a success rate is never narrower
than Wilson's of all episodes of the seeds, which holds where all seeds are equal by chance, as at 100%.

    comparison(runs)  {"groups": [{label, runs, seeds, settings, unfinished, results, numbers, curves}],
                       "settings": {path: [value of each group]}}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyrhythm.observe.intervals import student, wilson
from polyrhythm.plugins.report.read import Measured, Point, Run, mean_points, training_points

#: Settings in which runs of one group may differ: the seed, and where the run is.
_FREE = ("seed", "name", "out_dir", "resume")
#: Points of a mean curve; settings named in a group's label.
_POINTS, _NAMED = 80, 3
#: Axes of curves: name → attribute of a point, and metric.
AXES = {"transitions": "throughput/transitions", "time_s": "time_s"}
#: Results of summary.json that are compared.
_RESULTS = ("before", "after", "before_sampled", "after_sampled", "swapped")
#: Metrics of updates that are compared, besides success and return.
METRICS = (
    "throughput/transitions_per_s",
    "staleness/lag_mean",
    "env/episode_len",
    "train/actor/proximal_approx_kl",
    "train/actor/approx_kl",
    "train/actor/clip_fraction",
    "train/actor/entropy_loss",
    "train/actor/grad_norm",
    "train/critic/explained_variance",
)

Curve = Sequence[tuple[float, float]]


def comparison(runs: Sequence[Run]) -> dict[str, Any]:
    """The comparison of these runs as plain data."""
    groups = seed_groups(runs)
    differing = differing_settings([group[0] for group in groups])
    return {
        "groups": [
            {
                "label": _label(group, {path: values[place] for path, values in differing.items()}),
                "runs": [str(run.folder) for run in group],
                "seeds": [run.settings.get("seed", "?") for run in group],
                "settings": {path: values[place] for path, values in differing.items()},
                "unfinished": [str(run.folder) for run in group if not run.finished],
                "results": _results(group),
                "numbers": _numbers(group),
                "curves": {axis: _curves(group, axis) for axis in AXES},
            }
            for place, group in enumerate(groups)
        ],
        "settings": differing,
    }


def seed_groups(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs by equal settings except the seed, in order of their first run."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        key = tuple(sorted((path, value) for path, value in run.settings.items() if path not in _FREE))
        groups.setdefault(key or id(run), []).append(run)
    return list(groups.values())


def differing_settings(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings in which the runs differ, besides the seed, with the value of each; – where a run has none."""
    own = [run.settings for run in runs]
    paths = dict.fromkeys(path for each in own for path in each if path not in _FREE)
    found = {path: [each.get(path, "–") for each in own] for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}


def _label(group: Sequence[Run], settings: dict[str, str]) -> str:
    """`optimizer.lr 0.0001` if few settings differ, else the label of the first run."""
    if not 0 < len(settings) <= _NAMED:
        return group[0].label
    return ", ".join(f"{'.'.join(path.split('.')[-2:])} {value}" for path, value in settings.items())


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and 95% interval over seeds; with one seed low and high are None."""
    mean, low, high = student(values)
    several = len(values) > 1
    return {"mean": mean, "low": low if several else None, "high": high if several else None, "each": list(values)}


def _results(group: Sequence[Run]) -> dict[str, Any]:
    """Each result that a run of the group has: success, if reported, and return, over the seeds that have it."""
    found: dict[str, Any] = {}
    for name in _RESULTS:
        own = [result for run in group if (result := run.summary.get(name))]
        if own:
            found[name] = {"return": spread([float(result["mean_return"]) for result in own])}
            reported = [result for result in own if result["rate"] is not None]
            if reported:
                found[name]["success"] = _success(reported)
    return found


def _success(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    own = spread([float(result["rate"]) for result in results])
    episodes, successes = (sum(result[key] for result in results) for key in ("episodes", "successes"))
    if len(results) == 1:  # its own interval, which considers several samples of a state
        low, high = float(results[0]["low"]), float(results[0]["high"])
    else:
        pooled = wilson(successes, episodes)
        low, high = max(0.0, min(own["low"], pooled.low)), min(1.0, max(own["high"], pooled.high))
    return {**own, "low": low, "high": high, "episodes": episodes, "successes": successes}


def _numbers(group: Sequence[Run]) -> dict[str, Any]:
    """Throughput, lag and wall time, over the seeds that have them."""
    found = {
        "transitions_per_s": [run.summary.get("transitions_per_s") for run in group],
        "lag": [run.summary.get("lag", {}).get("mean") for run in group],
        "wall_s": [
            wall.get("total", sum(wall.values())) if (wall := run.summary.get("wall_s")) else None for run in group
        ],
    }
    known = {name: [float(value) for value in values if value is not None] for name, values in found.items()}
    return {name: spread(values) for name, values in known.items() if values}


def _curves(group: Sequence[Run], axis: str) -> dict[str, Any]:
    """Curves by name: success and return of training episodes and of evaluations, and `METRICS`."""
    over = AXES[axis]
    named: dict[str, list[Curve]] = {
        "success": [_points(training_points(run), axis, _rate) for run in group],
        "return": [_points(training_points(run), axis, _return) for run in group],
    }
    for way in dict.fromkeys(one.way for run in group for one in run.evaluations):
        own = [[one for one in run.evaluations if one.way == way] for run in group]
        named[f"evaluation/{way}/success"] = [_points(part, axis, _rate) for part in own]
        named[f"evaluation/{way}/return"] = [_points(part, axis, _return) for part in own]
    for metric in METRICS:
        named[metric] = [mean_points(run, metric, over) for run in group]
    bounded = {name for name in named if name.endswith("success")}
    found = {name: over_seeds([own for own in curves if own], rate=name in bounded) for name, curves in named.items()}
    return {name: curve for name, curve in found.items() if curve["each"]}


def _points(
    points: Sequence[Point] | Sequence[Measured], axis: str, value: Callable[[Point | Measured], float | None]
) -> Curve:
    return [(getattr(point, axis), y) for point in points if (y := value(point)) is not None]


def _rate(point: Point | Measured) -> float | None:
    return None if point.success is None else point.success.rate


def _return(point: Point | Measured) -> float | None:
    return point.mean_return


def over_seeds(curves: Sequence[Curve], *, rate: bool = False) -> dict[str, Any]:
    """{x, mean, low, high, each}: the mean over curves with its 95% interval, and each curve as {x, y}.

    x ascends in every curve. The mean is linearly interpolated where all curves are defined, so that it never jumps
    where one ends; it is empty for a single curve. rate: values are in 0..1, and so is the interval.
    """
    each = [{"x": [x for x, _ in curve], "y": [y for _, y in curve]} for curve in curves]
    found: dict[str, Any] = {"x": [], "mean": [], "low": [], "high": [], "each": each}
    if len(curves) < 2:
        return found
    first, last = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    if last < first:
        return found
    at = np.linspace(first, last, _POINTS if last > first else 1)
    values = np.array([np.interp(at, *np.transpose(curve)) for curve in curves])  # [seeds, points]
    bounds = np.array([student(column) for column in values.T.tolist()]).T
    if rate:
        bounds = bounds.clip(0.0, 1.0)
    mean, low, high = bounds.tolist()
    return {**found, "x": at.tolist(), "mean": mean, "low": low, "high": high}
