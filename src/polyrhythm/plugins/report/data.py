"""Makes the data of a page: one JSON object that the page, a comparison and a live view of a run share.

    {"format": 1,
     "title": "quickstart/20261128-082521",
     "runs": [{"label": ..., "finished": true, "colour": 0, "dash": 0}],
     "sections": [{"id": "success", "heading": "Success", "parts": [...]}]}

`runs` has one entry for the report of a run and several for a comparison; runs that differ only in their seed share a
colour. Sections are in the order of the page. Parts are text and numbers, see `parts`; `assets/` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polyrhythm.plugin import load_all
from polyrhythm.plugins.report import charts, gallery, seed_sections, tables
from polyrhythm.plugins.report.parts import Part, details, heading, text
from polyrhythm.plugins.report.read import ReportSection, Run
from polyrhythm.plugins.report.timeline import batch_sizes, timeline, waits

FORMAT = 1


def page_data(runs: Sequence[Run], draw: Callable[[ReportSection], Sequence[Part]] | None = None) -> dict[str, Any]:
    """The data of the report of one run, or of the comparison of several. draw: gives the parts of a section instead of
    drawing it."""
    draw = draw or (lambda section: section.draw(runs))
    looks = charts.looks(runs)
    return {
        "format": FORMAT,
        "title": f"{len(runs)} runs compared" if len(runs) > 1 else runs[0].label,
        "runs": [
            {"label": run.label, "finished": run.finished, "colour": look.colour, "dash": look.dash}
            for run, look in zip(runs, looks, strict=True)
        ],
        "sections": [
            {"id": section.id, "heading": section.heading, "parts": parts}
            for section in sections()
            if (parts := list(draw(section)))
        ],
    }


def sections() -> list[ReportSection]:
    """All sections in the order of the page; those of plugins behind the section that they name."""
    found = list(_SECTIONS)
    added: Sequence[ReportSection] = load_all("report")
    for section in added:
        ids = [one.id for one in found]
        place = ids.index(section.after) + 1 if section.after in ids else len(found)
        found.insert(place, section)
    return found


def each(runs: Sequence[Run], draw: Callable[[Run], Sequence[Part]]) -> list[Part]:
    """Parts of every run, with its label as heading if there are several."""
    found: list[Part] = []
    for run in runs:
        if own := draw(run):
            found += [heading(run.label), *own] if len(runs) > 1 else own
    return found


def _overview(runs: Sequence[Run]) -> list[Part]:
    if len(runs) > 1:  # the comparison has these numbers
        return []
    notice = "This run is not finished: here is what it has come to so far."
    return [*([] if runs[0].finished else [text(notice, "notice")]), *tables.tiles(runs[0])]


def _results(runs: Sequence[Run]) -> list[Part]:
    found = tables.results(runs)
    if len(runs) == 1:
        for part in (tables.by_task, tables.by_samples, tables.by_metric):
            found += part(runs[0])
    return found


def _traced(runs: Sequence[Run], draw: Callable[[Run, str], Sequence[Part]], name: str) -> list[Part]:
    """Parts from the trace of one run; traces are large, so a comparison leaves them to each run's own report."""
    return list(draw(runs[0], name)) if len(runs) == 1 else []


def _faults(run: Run) -> list[Part]:
    return tables.faults(run) + tables.set_aside(run)


def _configuration(runs: Sequence[Run]) -> Iterator[Part]:
    for run in runs:
        yield details(f"{run.label}: config.yaml", run.config)


_SECTIONS = (
    ReportSection("overview", "", _overview),
    ReportSection("seeds", "Comparison", seed_sections.draw_groups),
    ReportSection("settings", "Settings that differ", seed_sections.draw_settings),
    ReportSection("curves", "Over seeds", seed_sections.draw_curves),
    ReportSection("results", "Results", _results),
    gallery.SECTION,
    ReportSection("success", "Success", charts.success),
    ReportSection("return", "Mean return", charts.returns),
    ReportSection("tasks", "Tasks", charts.tasks),
    ReportSection("metrics", "The environment's own metrics", charts.env_metrics),
    ReportSection("updates", "Updates", charts.updates),
    ReportSection("throughput", "Throughput", charts.throughput),
    ReportSection("timeline", "Timeline of the stations", lambda runs: _traced(runs, timeline, "timeline")),
    ReportSection(
        "waits",
        "Waiting by cause",
        lambda runs: [*_traced(runs, waits, "waits"), *charts.wait_ratios(runs)],
    ),
    ReportSection(
        "batches",
        "Batches",
        lambda runs: [*_traced(runs, batch_sizes, "batches"), *charts.batches(runs)],
    ),
    ReportSection("utilisation", "Utilisation", charts.utilisation),
    ReportSection("lag", "Lag", charts.lag),
    ReportSection("wall-time", "Wall time", charts.wall_time),
    ReportSection("ledger", "Ledger", tables.ledger),
    ReportSection("faults", "Faults", lambda runs: each(runs, _faults)),
    ReportSection("weights", "Weights", lambda runs: each(runs, tables.weights)),
    ReportSection("changes", "Settings that were changed", lambda runs: each(runs, tables.changes)),
    ReportSection("configuration", "Configuration", lambda runs: list(_configuration(runs))),
)
