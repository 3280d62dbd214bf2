"""Makes the charts of a report from the lines of metrics; each shows one run, or compares several.

With one run each series has its own colour; with several runs each run has its own, runs that differ only in their
seed share one and differ in their dash.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polyrhythm.observe.activity import by_kind
from polyrhythm.plugins.report.parts import (
    COLOURS,
    BarSeries,
    Part,
    RateEstimate,
    Scale,
    bars,
    chart,
    intervals,
    series,
    text,
)
from polyrhythm.plugins.report.read import (
    POINTS,
    Measured,
    Point,
    Run,
    curve,
    pace_points,
    run_marks,
    training_points,
)
from polyrhythm.plugins.report.seeds import seed_groups
from polyrhythm.plugins.report.tables import RESULTS

_WAYS = ("greedy", "sampled", "swapped")
#: More stations than this are shown by kind.
_STATIONS = 8
_TASK = "env/success_once/task_"


class Look(NamedTuple):
    colour: int
    dash: int


def looks(runs: Sequence[Run]) -> list[Look]:
    """Colour of each run's seed group, and its dash in the group."""
    groups = seed_groups(runs)
    found = {id(run): Look(number, dash) for number, group in enumerate(groups) for dash, run in enumerate(group)}
    return [found[id(run)] for run in runs]


def all_marks(runs: Sequence[Run]) -> list[Part]:
    return [mark for run in runs for mark in run_marks(run)]


# ---------------------------------------------------------------- success and return


def success(runs: Sequence[Run]) -> list[Part]:
    """Success: evaluations as points with intervals, training as a curve; none if success is not measured."""
    if not any(run.measures_success for run in runs):
        return []
    sentence = (
        "The curve is the success of training episodes, with noise; the points are evaluations on held-out seeds, each "
        "with its Wilson 95% interval."
    )
    return _learning(runs, "success", sentence, Scale("success", 0.0, 1.0, percent=True))


def returns(runs: Sequence[Run]) -> list[Part]:
    """Mean return, in the form of `success`."""
    measured = any(run.measures_success for run in runs)
    sentence = (
        f"{'' if measured else 'This environment reports no success. '}The curve is the mean return of training "
        "episodes, with noise; the points are evaluations on held-out seeds."
    )
    return _learning(runs, "return", sentence, Scale("mean return"))


def _learning(runs: Sequence[Run], name: str, sentence: str, scale: Scale) -> list[Part]:
    """Training curves and evaluations of each run."""
    curves: list[Part] = []
    for run, look in zip(runs, looks(runs), strict=True):
        curves.append(_training(run, name, "training episodes" if len(runs) == 1 else run.label, look))
        curves += _evaluations(run, name, None if len(runs) == 1 else look)
    curves = [one for one in curves if one["y"]]
    if not curves:
        return []
    title = f"{name.capitalize()} of training episodes and of evaluations"
    return [text(sentence, "soft"), chart(name, title, scale, curves, marks=all_marks(runs), size="wide")]


def _value(one: Measured | Point, name: str) -> float | None:
    """Its success or its return; None if it has none."""
    if name == "return":
        return one.mean_return
    return None if one.success is None else one.success.rate


def _training(run: Run, name: str, label: str, look: Look) -> Part:
    points = [point for point in training_points(run) if _value(point, name) is not None]
    rates = [point.success for point in points if point.success is not None] if name == "success" else []
    return series(
        label,
        look.colour,
        {"transitions": [point.transitions for point in points], "time": [point.time_s for point in points]},
        [_value(point, name) for point in points],
        dash=look.dash,
        low=[rate.low for rate in rates],
        high=[rate.high for rate in rates],
    )


def _evaluations(run: Run, name: str, look: Look | None) -> list[Part]:
    found = []
    for number, way in enumerate(_WAYS):
        own = [one for one in run.evaluations if one.way == way and _value(one, name) is not None]
        own.sort(key=lambda one: one.transitions)
        rates = [one.success for one in own if one.success is not None] if name == "success" else []
        label = f"evaluation, {way}"
        points = series(
            label if look is None else f"{run.label}: {label}",
            1 + number if look is None else look.colour,
            {"transitions": [one.transitions for one in own], "time": [one.time_s for one in own]},
            [_value(one, name) for one in own],
            dash=number,
            style="points",
            low=[rate.low for rate in rates],
            high=[rate.high for rate in rates],
        )
        found += [points] if own else []
    return found


def tasks(runs: Sequence[Run]) -> list[Part]:
    """Success by task of one run: of evaluations with intervals, of training episodes as curves."""
    run = runs[0]
    if len(runs) > 1 or not run.measures_success:
        return []
    results = [name for name in RESULTS if "tasks" in (run.summary.get(name) or {})]
    names = list(dict.fromkeys(task for name in results for task in run.summary[name]["tasks"]))
    parts = []
    if len(names) > 1:
        rows = [(task, [one for name in results if (one := _estimate(run, name, task)) is not None]) for task in names]
        parts.append(intervals("tasks-evaluated", "Success of evaluations by task", rows))
    keys = sorted(
        {key for line in run.updates for key in line if key.startswith(_TASK)}, key=lambda key: (len(key), key)
    )
    curves = []
    for number, key in enumerate(keys):
        index = key.removeprefix(_TASK)
        label = names[number] if len(names) == len(keys) else f"task {index}"
        found = curve(run, key, most=POINTS)
        curves.append(series(label, number, found.x, found.y, dash=number // COLOURS))
    if curves:
        scale = Scale("success", 0.0, 1.0, percent=True)
        parts.append(chart("tasks-trained", "Success of training episodes by task", scale, curves))
    return parts


def _estimate(run: Run, name: str, task: str) -> RateEstimate | None:
    own = run.summary[name]["tasks"].get(task)
    if own is None or own["rate"] is None:
        return None
    note = f"{own['successes']} of {own['episodes']}"
    return RateEstimate(RESULTS[name], list(RESULTS).index(name), own["rate"], own["low"], own["high"], note)


# ---------------------------------------------------------------- metrics of updates


class MetricLine(NamedTuple):
    """A metric's chart: label, scale factor, least upper end of the axis, and lower clipping limit of values."""

    label: str
    factor: float = 1.0
    top: float | None = None
    floor: float = -math.inf


_ENV_GROUP = "env/metrics/"
_METRICS = {
    "train/actor/proximal_approx_kl": MetricLine("KL from proximal, 10⁻³ nats", factor=1000.0),
    "train/actor/behav_approx_kl": MetricLine("KL from behaviour, 10⁻³ nats", factor=1000.0),
    "train/actor/approx_kl": MetricLine("KL from behaviour, 10⁻³ nats", factor=1000.0),
    "train/actor/clip_fraction": MetricLine("entries clipped, %", factor=100.0, top=5.0),
    "train/actor/entropy_loss": MetricLine("entropy, nats"),
    "train/actor/grad_norm": MetricLine("gradient norm before clipping"),
    # Unbounded below early in a critic's training.
    "train/critic/explained_variance": MetricLine("explained variance", top=1.0, floor=-1.0),
    "train/actor/lr": MetricLine("learning rate"),
}


def updates(runs: Sequence[Run]) -> list[Part]:
    """KL, clipping, entropy, gradients and explained variance."""
    parts = [part for name, metric in _METRICS.items() for part in metric_chart(runs, name, metric)]
    sentence = (
        "Approximate KL divergence from the proximal and from the behaviour policy, clipping, entropy, gradients, and "
        "how much of the returns the values explain (below -1 drawn at -1)."
    )
    return [text(sentence, "soft"), *parts] if parts else []


def env_metrics(runs: Sequence[Run]) -> list[Part]:
    """The metrics of training episodes that the environment declares."""
    names = sorted({name for run in runs for line in run.updates for name in line if name.startswith(_ENV_GROUP)})
    parts = [part for name in names for part in metric_chart(runs, name, MetricLine(name.removeprefix(_ENV_GROUP)))]
    return [text("Metrics that the environment declares, of training episodes.", "soft"), *parts] if parts else []


def metric_chart(runs: Sequence[Run], name: str, metric: MetricLine) -> list[Part]:
    """The chart of one metric for all runs that have it; none if no run does."""
    curves = []
    for run, look in zip(runs, looks(runs), strict=True):
        found = curve(run, name)
        values = [max(metric.factor * value, metric.floor) for value in found.y]
        if values:
            label = metric.label if len(runs) == 1 else run.label
            curves.append(series(label, look.colour, found.x, values, dash=look.dash))
    scale = Scale(metric.label, 0.0, metric.top)
    return [chart(f"metric-{name}", metric.label, scale, curves, marks=all_marks(runs))] if curves else []


# ---------------------------------------------------------------- throughput, utilisation, lag


def throughput(runs: Sequence[Run]) -> list[Part]:
    """Transitions per second, with faults marked."""
    curves = []
    for run, look in zip(runs, looks(runs), strict=True):
        points = pace_points(run)
        x = {"transitions": [point[1] for point in points], "time": [point[0] for point in points]}
        y = [point[2] for point in points]
        if y:
            label = "transitions/s" if len(runs) == 1 else run.label
            curves.append(series(label, look.colour, x, y, dash=look.dash))
    if not curves:
        return []
    sentence = (
        "Env steps of the training samples that finished, each second; evaluations before and after are left out. A "
        "line is interrupted where no update ended for long: the run was resumed or evaluated there."
    )
    scale = Scale("transitions/s")
    title = "Throughput of training"
    return [text(sentence, "soft"), chart("throughput", title, scale, curves, marks=all_marks(runs), size="wide")]


def utilisation(runs: Sequence[Run]) -> list[Part]:
    """Utilisation of each station: bars for the whole training, and for one run also curves."""
    shares = [by_kind(run.summary.get("utilisation", {}), _STATIONS) for run in runs]
    stations = list(dict.fromkeys(name for own in shares for name in own))
    parts = [share_bars("utilisation-bars", "Utilisation of each station", runs, shares)] if stations else []
    if len(runs) == 1:
        parts += share_curves("utilisation", runs[0], "stations/utilisation/", stations)
    if not parts:
        return []
    sentence = (
        "The share of training in which each station was at work, waiting for a processor core included; the one near "
        "100% sets the tempo, the others wait for it. Curves: of the last ten seconds."
    )
    return [text(sentence, "soft"), *parts]


def share_bars(name: str, title: str, runs: Sequence[Run], shares: Sequence[dict[str, float]]) -> Part:
    """A bar for each station (or other share) and run. shares: by run and name."""
    groups = list(dict.fromkeys(station for own in shares for station in own))
    content = [
        BarSeries("share at work" if len(runs) == 1 else run.label, number, [own.get(group) for group in groups])
        for number, (run, own) in enumerate(zip(runs, shares, strict=True))
    ]
    return bars(name, title, groups, content)


def share_curves(name: str, run: Run, prefix: str, order: Sequence[str]) -> list[Part]:
    """Curves of the metrics with this prefix, between 0 and 1, if they are not too many to tell apart."""
    found = sorted({key for line in run.updates for key in line if key.startswith(prefix)})
    places = {station: place for place, station in enumerate(order)}
    found.sort(key=lambda key: places.get(key.removeprefix(prefix), len(places)))
    if not found or len(found) > _STATIONS:
        return []
    curves = []
    for number, key in enumerate(found):
        own = curve(run, key)
        curves.append(series(key.removeprefix(prefix), number, own.x, own.y))
    scale = Scale("share at work", 0.0, 1.0, percent=True)
    return [chart(f"{name}-curves", "Utilisation over time", scale, curves, marks=run_marks(run))]


_WAITS = {
    "rollouter/idle_ratio": "rows without a ticket",
    "trainer/idle_ratio": "trainer idle",
    "rollouter/batch_wait_ratio": "a pass waits for more requests",
}


def wait_ratios(runs: Sequence[Run]) -> list[Part]:
    """Shares of the time in which rows, the trainer and passes waited, from the metrics."""
    return _shares_by_name(runs, "waits-ratios", "Waiting, from the metrics", _WAITS)


def _shares_by_name(runs: Sequence[Run], name: str, title: str, metrics: dict[str, str]) -> list[Part]:
    curves = []
    for run, look in zip(runs, looks(runs), strict=True):
        for number, (metric, label) in enumerate(metrics.items()):
            found = curve(run, metric)
            if found.y and len(runs) == 1:
                curves.append(series(label, number, found.x, found.y))
            elif found.y:
                curves.append(series(f"{run.label}: {label}", look.colour, found.x, found.y, dash=number))
    scale = Scale("share of the time", 0.0, 1.0, percent=True)
    return [chart(name, title, scale, curves, marks=all_marks(runs))] if curves else []


def batches(runs: Sequence[Run]) -> list[Part]:
    """Rows of forward passes, and their padding."""
    parts = metric_chart(runs, "rollouter/batch_rows", MetricLine("rows of a forward pass, mean"))
    if any(line.get("rollouter/padding_ratio") for run in runs for line in run.updates):
        parts += metric_chart(runs, "rollouter/padding_ratio", MetricLine("padding of a pass, %", factor=100.0))
    return parts


def lag(runs: Sequence[Run]) -> list[Part]:
    """Lag of trained samples: a histogram, and curves."""
    bars_, curves = [], []
    for run, look in zip(runs, looks(runs), strict=True):
        counts = {int(versions): count for versions, count in run.summary.get("lag", {}).get("counts", {}).items()}
        total, label = sum(counts.values()), "samples" if len(runs) == 1 else run.label
        shares = [counts[versions] / total for versions in sorted(counts)]
        if shares:
            bars_.append(series(label, look.colour, {"lag": sorted(counts)}, shares, dash=look.dash, style="bars"))
        mean, most = curve(run, "staleness/lag_mean"), curve(run, "staleness/lag_max", max)
        if mean.y:
            mean_label = "mean" if len(runs) == 1 else run.label
            curves.append(series(mean_label, look.colour, mean.x, mean.y, dash=look.dash))
        if most.y and len(runs) == 1:
            curves.append(series("largest", 1, most.x, most.y, dash=1, style="steps"))
    if not bars_ and not curves:
        return []
    stated = runs[0].summary.get("lag")
    words = f" Mean {stated['mean']:.2f}, largest {stated['max']}." if len(runs) == 1 and stated else ""
    sentence = (
        f"The trainer's version minus the oldest version of the weights in a sample, when the trainer got it.{words}"
    )
    parts = [text(sentence, "soft")]
    if bars_:
        scale = Scale("share of samples", percent=True)
        parts.append(chart("lag-counts", "Samples by lag", scale, bars_, x={"lag": "lag in versions"}))
    if curves:
        parts.append(
            chart(
                "lag", "Lag of an update's samples", Scale("lag in versions", 0.0, 1.0), curves, marks=all_marks(runs)
            )
        )
    return parts


def wall_time(runs: Sequence[Run]) -> list[Part]:
    """Seconds of each phase as one bar per run."""
    walls = [{k: v for k, v in run.summary.get("wall_s", {}).items() if k != "total"} for run in runs]
    phases = list(dict.fromkeys(phase for wall in walls for phase in wall))
    if not phases:
        return []
    content = [
        BarSeries(
            "reinforcement learning" if phase == "rl" else phase.replace("_", " "),
            number,
            [wall.get(phase) for wall in walls],
        )
        for number, phase in enumerate(phases)
    ]
    sentence = "Seconds of each phase, over all parts of the run if it was interrupted."
    labels = [run.label for run in runs] if len(runs) > 1 else ["wall time"]
    drawn = bars("wall-time", "Wall time by phase", labels, content, unit="s", stacked=True, size="wide")
    return [text(sentence, "soft"), drawn]
