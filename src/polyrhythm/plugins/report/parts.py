"""Makes the parts of a section: text and numbers that the page's scripts draw (`assets/`). No part holds HTML.

A part is a JSON object with a `kind`, which names the function of `PARTS` in the page's scripts that draws it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Part = dict[str, Any]

#: Colours and dashes of series.
COLOURS, DASHES = 10, 4
#: Keys of a chart's horizontal axes that every curve of a run has, with their labels; time in seconds.
AXES = {"transitions": "transitions (env steps of finished training samples)", "time": "time since the run began"}


def number(value: float | None) -> float | None:
    """The value with six digits; None if it is not finite."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def numbers(values: Iterable[float | None]) -> list[float | None]:
    return [number(value) for value in values]


def text(words: str, tone: str = "plain") -> Part:
    """A paragraph. tone: plain, soft (a caption) or notice (a problem)."""
    return {"kind": "text", "text": words, "tone": tone}


def heading(words: str) -> Part:
    return {"kind": "heading", "text": words}


def tiles(items: Iterable[tuple[str, str, str]]) -> Part:
    """Key numbers: (name, value, note)."""
    return {"kind": "tiles", "items": [{"name": name, "value": value, "note": note} for name, value, note in items]}


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> Part:
    """A table whose first column are the rows' headings. Cells are text."""
    return {"kind": "table", "caption": caption, "head": list(head), "rows": [list(row) for row in rows]}


def details(summary: str, content: str) -> Part:
    """Preformatted text that is closed until it is opened."""
    return {"kind": "details", "summary": summary, "text": content}


def series(
    label: str,
    colour: int,
    x: Mapping[str, Iterable[float | None]],
    y: Iterable[float | None],
    *,
    dash: int = 0,
    style: str = "line",
    low: Iterable[float | None] = (),
    high: Iterable[float | None] = (),
) -> Part:
    """A series of a chart.

    x: by axis, ascending; style: line, steps, points, bars or area (stacked on the areas before it); low, high: edges
    of a line's band or of a point's interval.
    """
    return {
        "label": label,
        "colour": colour % COLOURS,
        "dash": dash % DASHES,
        "style": style,
        "x": {axis: numbers(values) for axis, values in x.items()},
        "y": numbers(y),
        "low": numbers(low),
        "high": numbers(high),
    }


def mark(label: str, tone: str, x: Mapping[str, float]) -> Part:
    """A vertical line of a chart or of the timeline. tone: fault, alarm or change."""
    return {"label": label, "tone": tone, "x": {axis: number(value) for axis, value in x.items()}}


class Scale(NamedTuple):
    """A chart's vertical axis. low, high: what it shows at least; percent: values are shares."""

    label: str
    low: float | None = 0.0
    high: float | None = None
    percent: bool = False


def chart(
    name: str,
    title: str,
    y: Scale,
    curves: Iterable[Part],
    *,
    x: Mapping[str, str] = AXES,
    marks: Sequence[Part] = (),
    size: str = "half",
) -> Part:
    """A chart with axes that can be zoomed. name: unique on the page; x: labels of the axes that it can be drawn over;
    size: wide or half (two side by side if they fit)."""
    return {
        "kind": "chart",
        "id": name,
        "title": title,
        "x": dict(x),
        "y": y._asdict(),
        "series": list(curves),
        "marks": list(marks),
        "size": size,
    }


class BarSeries(NamedTuple):
    """Values of one series of bars, by group; None: no bar."""

    label: str
    colour: int
    values: Sequence[float | None]


def bars(
    name: str,
    title: str,
    groups: Sequence[str],
    content: Iterable[BarSeries],
    *,
    unit: str = "share",
    stacked: bool = False,
    size: str = "half",
) -> Part:
    """Horizontal bars. unit: share (drawn as a percentage) or s."""
    found = [{"label": one.label, "colour": one.colour % COLOURS, "values": numbers(one.values)} for one in content]
    return {
        "kind": "bars",
        "id": name,
        "title": title,
        "groups": list(groups),
        "series": found,
        "unit": unit,
        "stacked": stacked,
        "size": size,
    }


class RateEstimate(NamedTuple):
    """A success rate with its interval. note: such as its counts."""

    series: str
    colour: int
    rate: float
    low: float
    high: float
    note: str = ""


def intervals(name: str, title: str, rows: Iterable[tuple[str, Iterable[RateEstimate]]]) -> Part:
    """Success rates with intervals on one scale from 0 to 1. rows: label and its estimates."""
    found = [{"label": label, "values": [one._asdict() for one in own]} for label, own in rows]
    return {"kind": "intervals", "id": name, "title": title, "rows": found}
