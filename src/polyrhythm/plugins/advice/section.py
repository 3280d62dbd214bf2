"""The report's section on what to change, and the run's other warnings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyrhythm.plugins.advice.findings import Finding, text_of
from polyrhythm.plugins.advice.runs import findings_of
from polyrhythm.plugins.report.data import each
from polyrhythm.plugins.report.parts import Part, table, text
from polyrhythm.plugins.report.read import ReportSection, Run

_HEAD = ("set", "transitions/s", "now", "cost")


def draw(run: Run) -> list[Part]:
    """The findings in order, then the warnings that no finding explains."""
    found = findings_of(run)
    explained = {finding.alarm for finding in found}
    notices = [text(sentence, "notice") for sentence in run.setbacks if sentence not in explained]
    return [*(part for place, one in enumerate(found, 1) for part in _finding(place, one)), *notices]


def _finding(number: int, finding: Finding) -> Iterator[Part]:
    tone = "notice" if finding.kind == "stability" else "plain"
    said = "; ".join(words for words in (finding.measured, finding.remedy, finding.note) if words)
    yield text(f"{number}. {finding.kind.capitalize()}: {said}.", tone)
    if rows := [[one.override, str(one.effect), text_of(one.now), one.cost] for one in finding.changes]:
        yield table(_HEAD, rows, f"What to change for {number}, the first row first ({finding.page}).")


def _draw(runs: Sequence[Run]) -> list[Part]:
    return each(runs, draw)


SECTION = ReportSection("advice", "Advice", _draw, after="curves")
