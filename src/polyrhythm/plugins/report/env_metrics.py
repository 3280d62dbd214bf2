"""Draws the figure of the environment's own metrics, one small chart for each."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.plugins.report.figures import Figure, run_keys
from polyrhythm.plugins.report.read import Run
from polyrhythm.plugins.report.updates import Chart, draw

_GROUP = "env/metrics/"


def env_metrics(runs: Sequence[Run]) -> Figure | None:
    """The metrics of training episodes over transitions; None if the runs have none."""
    names = sorted({name for run in runs for line in run.updates for name in line if name.startswith(_GROUP)})
    pictures = [picture for name in names if (picture := draw(runs, name, Chart(name.removeprefix(_GROUP))))]
    if not pictures:
        return None
    sentence = (
        "Metrics that the environment declares, of training episodes, with noise; each point is a mean over the "
        "updates since the point before."
    )
    return Figure("The environment's own metrics", sentence, run_keys(runs) if len(runs) > 1 else [], pictures)
