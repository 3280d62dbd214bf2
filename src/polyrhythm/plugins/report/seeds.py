"""Aggregates runs that differ only in their seed: means and 95% intervals over seeds, of results and of curves.

The interval over seeds is Student's, so it says how another seed would do. That of a success rate is never narrower
than Wilson's of all episodes of the seeds, which holds where all seeds are equal by chance, as at 100%.

    comparison(runs)  {"groups": [{label, runs, seeds, settings, unfinished, results, numbers, curves}],
                       "settings": {path: [value of each group]}}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrhythm.observe.intervals import student, wilson
from polyrhythm.plugins.report.read import POINTS, Measured, Point, Run, curve, training_points
from polyrhythm.plugins.report.tables import RESULTS

#: Settings in which runs of one group may differ: seeds, and where the run is. Not that of the evaluation: its states.
_FREE = ("seed", "demonstrations.seed", "name", "out_dir", "resume")
#: Points of a mean curve; settings named in a group's label.
_COLUMNS, _NAMED = 80, 3
#: Axes of curves: name → attribute of a point.
AXES = {"transitions": "transitions", "time": "time_s"}
#: Range of a quantity, to which its interval is cut.
Range = tuple[float, float]
_RATE: Range = (0.0, 1.0)
_POSITIVE: Range = (0.0, math.inf)
_ANY: Range = (-math.inf, math.inf)


class ComparedMetric(NamedTuple):
    label: str
    range: Range = _ANY


#: Metrics of updates that are compared, besides success and return.
METRICS = {
    "throughput/transitions_per_s": ComparedMetric("transitions/s", _POSITIVE),
    "staleness/lag_mean": ComparedMetric("lag in versions, mean", _POSITIVE),
    "env/episode_len": ComparedMetric("env steps of an episode", _POSITIVE),
    "train/actor/proximal_approx_kl": ComparedMetric("KL from proximal, nats", _POSITIVE),
    "train/actor/approx_kl": ComparedMetric("KL from behaviour, nats", _POSITIVE),
    "train/actor/clip_fraction": ComparedMetric("share of entries clipped", _RATE),
    "train/actor/entropy_loss": ComparedMetric("entropy, nats"),
    "train/actor/grad_norm": ComparedMetric("gradient norm before clipping", _POSITIVE),
    # Unbounded below early in a critic's training, so drawn as in a run's report.
    "train/critic/explained_variance": ComparedMetric("explained variance", (-1.0, 1.0)),
}

Curve = Sequence[tuple[float, float]]


def comparison(runs: Sequence[Run], *, curves: bool = True) -> dict[str, Any]:
    """The comparison of these runs as plain data. curves: False leaves them out, which take most of the time."""
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
                **({"curves": {axis: _curves(group, axis) for axis in AXES}} if curves else {}),
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


def spread(values: Sequence[float], limits: Range = _ANY) -> dict[str, Any]:
    """Mean and 95% interval over seeds; with one seed low and high are None. limits: of the quantity."""
    mean, low, high = student(values)
    low, high = max(low, limits[0]), min(high, limits[1])
    several = len(values) > 1
    return {"mean": mean, "low": low if several else None, "high": high if several else None, "each": list(values)}


def _results(group: Sequence[Run]) -> dict[str, Any]:
    """Each result that a run of the group has: success, if reported, and return, over the seeds that have it."""
    found: dict[str, Any] = {}
    for name in RESULTS:
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
    return {name: spread(values, _POSITIVE) for name, values in known.items() if values}


def _curves(group: Sequence[Run], axis: str) -> dict[str, Any]:
    """Curves by name: success and return of training episodes and of evaluations, and `METRICS`."""
    found: dict[str, Any] = {}
    trained = [training_points(run) for run in group]
    for name, (value, limits) in _VALUES.items():
        found[name] = over_seeds([_points(own, axis, value) for own in trained], limits)
        for way in dict.fromkeys(one.way for run in group for one in run.evaluations):
            own = [_points([one for one in run.evaluations if one.way == way], axis, value) for run in group]
            found[f"evaluation/{way}/{name}"] = points_over_seeds(own, limits)
    for metric, (_, limits) in METRICS.items():
        curves = [curve(run, metric, most=POINTS) for run in group]
        found[metric] = over_seeds([list(zip(own.x.get(axis, ()), own.y, strict=False)) for own in curves], limits)
    return {name: own for name, own in found.items() if own["each"]}


def _points(
    points: Sequence[Point] | Sequence[Measured], axis: str, value: Callable[[Point | Measured], float | None]
) -> Curve:
    return [(getattr(point, AXES[axis]), y) for point in points if (y := value(point)) is not None]


def _rate(point: Point | Measured) -> float | None:
    return None if point.success is None else point.success.rate


def _return(point: Point | Measured) -> float | None:
    return point.mean_return


#: Value of a point, and its range.
_VALUES = {"success": (_rate, _RATE), "return": (_return, _ANY)}


def over_seeds(curves: Sequence[Curve], limits: Range = _ANY) -> dict[str, Any]:
    """{x, mean, low, high, each}: the mean over curves with its 95% interval, and each curve as {x, y}.

    x ascends in every curve; empty ones are left out. The mean is linearly interpolated where all curves are defined,
    so that it never jumps where one ends; it is empty for a single curve. limits: of the values and the interval.
    """
    curves = [[(x, min(max(y, limits[0]), limits[1])) for x, y in own] for own in curves if own]
    found = _each(curves)
    if len(curves) < 2:
        return found
    first, last = max(own[0][0] for own in curves), min(own[-1][0] for own in curves)
    if last < first:
        return found
    at = np.linspace(first, last, _COLUMNS if last > first else 1)
    values = np.array([np.interp(at, *np.transpose(own)) for own in curves])  # [seeds, points]
    return {**found, "x": at.tolist(), **_intervals(values, limits)}


def points_over_seeds(curves: Sequence[Curve], limits: Range = _ANY) -> dict[str, Any]:
    """The same for evaluations: the n-th of every seed are one point, at their mean x."""
    curves = [own for own in curves if own]
    found, count = _each(curves), min(map(len, curves), default=0)
    if len(curves) < 2:
        return found
    points = np.array([own[:count] for own in curves])  # [seeds, points, 2]
    return {**found, "x": points[:, :, 0].mean(0).tolist(), **_intervals(points[:, :, 1], limits)}


def _each(curves: Sequence[Curve]) -> dict[str, Any]:
    each = [{"x": [x for x, _ in own], "y": [y for _, y in own]} for own in curves]
    return {"x": [], "mean": [], "low": [], "high": [], "each": each}


def _intervals(values: np.ndarray, limits: Range) -> dict[str, list[float]]:
    """Mean and interval of each column."""
    bounds = np.array([student(column) for column in values.T.tolist()]).T
    mean, low, high = bounds.clip(*limits).tolist()
    return {"mean": mean, "low": low, "high": high}
