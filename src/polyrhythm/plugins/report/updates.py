"""Draws a small chart for each training metric and each metric of the environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polyrhythm.plugins.report.figures import HALF, Figure, change_keys, look, mark_changes, run_keys
from polyrhythm.plugins.report.read import Run, mean_points
from polyrhythm.plugins.report.svg import Plot


class Chart(NamedTuple):
    """A metric's chart: label, scale factor, minimum upper end of the axis, and lower clipping limit of values."""

    words: str
    factor: float = 1.0
    top: float = 0.0
    floor: float = -math.inf


_ENV_GROUP = "env/metrics/"
_CHARTS = {
    "train/actor/proximal_approx_kl": Chart("KL from proximal, 10⁻³ nats", factor=1000.0),
    "train/actor/behav_approx_kl": Chart("KL from behaviour, 10⁻³ nats", factor=1000.0),
    "train/actor/approx_kl": Chart("KL from behaviour, 10⁻³ nats", factor=1000.0),
    "train/actor/clip_fraction": Chart("entries clipped, %", factor=100.0, top=5.0),
    "train/actor/entropy_loss": Chart("entropy, nats"),
    "train/actor/grad_norm": Chart("gradient norm before clipping"),
    # Unbounded below early in a critic's training.
    "train/critic/explained_variance": Chart("explained variance", top=1.0, floor=-1.0),
}


def updates(runs: Sequence[Run]) -> Figure | None:
    """KL, clipping, entropy, gradients and explained variance over transitions; None if no run has them."""
    pictures = [picture for name, chart in _CHARTS.items() if (picture := draw(runs, name, chart))]
    if not pictures:
        return None
    sentence = (
        "Approximate KL divergence from the proximal and from the behaviour policy, clipping, entropy, gradients, and "
        "how much of the returns the values explain (below -1 drawn at -1); each point is a mean over the updates "
        "since the point before."
    )
    return Figure("Updates", sentence, (run_keys(runs) if len(runs) > 1 else []) + change_keys(runs), pictures)


def env_metrics(runs: Sequence[Run]) -> Figure | None:
    """The metrics of training episodes over transitions; None if no run has any."""
    names = sorted({name for run in runs for line in run.updates for name in line if name.startswith(_ENV_GROUP)})
    pictures = [picture for name in names if (picture := draw(runs, name, Chart(name.removeprefix(_ENV_GROUP))))]
    if not pictures:
        return None
    sentence = (
        "Metrics that the environment declares, of training episodes, with noise; each point is a mean over the "
        "updates since the point before."
    )
    return Figure("The environment's own metrics", sentence, run_keys(runs) if len(runs) > 1 else [], pictures)


def draw(runs: Sequence[Run], name: str, chart: Chart) -> str:
    """The chart of one metric for all runs that have it; "" if none does."""
    curves = [[(x, max(chart.factor * y, chart.floor)) for x, y in mean_points(run, name)] for run in runs]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    last, values = max(x for x, _ in points), [y for _, y in points]
    low, high = min(0.0, *values), max(chart.top, *values)
    plot = Plot(f"{chart.words} over transitions", (0, last), (low, high + 0.05 * (high - low)), size=HALF)
    plot.axes("transitions", chart.words)
    for number, curve in enumerate(curves):
        plot.line(curve, look(number))
    mark_changes(plot, runs)
    return plot.text
