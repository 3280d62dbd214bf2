"""The report's curves of the main machine's cores and GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from polyrhythm.plugins.report.parts import Part, Scale, chart, series
from polyrhythm.plugins.report.read import ReportSection, Run, curve, run_marks

_CORES = {"cpu/utilization": "processor cores", "cpu/own": "by this run"}


def draw(runs: Sequence[Run]) -> list[Part]:
    """Curves of one run; a comparison leaves them to each run's own report."""
    if len(runs) != 1:
        return []
    names = sorted({name for line in runs[0].updates for name in line if name.startswith(("cpu/", "gpu/"))})
    memory = [name for name in names if name.endswith("/memory_gb")]
    shares = [name for name in names if name not in memory]
    found = _chart(runs[0], "hardware-use", "Use", Scale("share in use", 0.0, 1.0, percent=True), shares)
    return found + _chart(runs[0], "hardware-memory", "Memory in use", Scale("GB"), memory)


def _chart(run: Run, name: str, title: str, scale: Scale, metrics: Sequence[str]) -> list[Part]:
    curves = []
    for number, metric in enumerate(metrics):
        found = curve(run, metric)
        label = _CORES.get(metric) or metric.rpartition("/")[0].replace("/", " ")
        curves.append(series(label, number, found.x, found.y))
    return [chart(name, title, scale, curves, marks=run_marks(run))] if curves else []


SECTION = ReportSection("hardware", "Cores and GPUs of the main machine", draw, after="utilisation")
