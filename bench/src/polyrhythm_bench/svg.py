"""Draws charts as SVG text: axes, lines, bands, points with error bars, rectangles. CSS classes set colours and fonts.

Callers pass data coordinates; the output is in picture units, 1 CSS pixel each at full width. A series has a class
`s0`…`s6` (colour), a line also `d0`…`d3` (dash), so series never differ only in colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

Format = Callable[[float], str]

#: Point marks by way of evaluation, as paths around the origin.
MARKS = ("M-4.5,0a4.5,4.5 0 1,0 9,0a4.5,4.5 0 1,0 -9,0", "M-4,-4h8v8h-8z", "M0,-5.5L5,4H-5z", "M0,-6L5,0 0,6 -5,0z")


#: About the width of a digit of a tick's label; charts wider than this are shrunk on a phone.
_DIGIT, _NARROW = 7.0, 640


def short(value: float) -> str:
    """The number in short form: `0`, `0.25`, `12.5`, `800`, `1.25k`, `12k`, `1.2M`."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


class Plot:
    """A chart over the ranges x and y; methods add elements, `text` is the SVG."""

    def __init__(
        self,
        title: str,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        size: tuple[int, int] = (920, 300),
        right: int = 16,
    ) -> None:
        self.width, self.height = size
        self._title = title
        self._left, self._right, self._top, self._bottom = 58, right, 10, 42
        (self._x0, self._x1), (self._y0, self._y1) = _wide(x), _wide(y)
        self._parts: list[str] = []

    def px(self, x: float) -> float:
        share = (x - self._x0) / (self._x1 - self._x0)
        return self._left + share * (self.width - self._left - self._right)

    def py(self, y: float) -> float:
        share = (y - self._y0) / (self._y1 - self._y0)
        return self.height - self._bottom - share * (self.height - self._top - self._bottom)

    def axes(
        self,
        x_label: str,
        y_label: str,
        *,
        y_format: Format = short,
        x_ticks: Sequence[float] | None = None,
        y_ticks: Sequence[float] | None = None,
    ) -> None:
        """Draw grid lines, tick labels (by default at round numbers) and axis titles."""
        rows = [(y, y_format(y)) for y in (ticks(self._y0, self._y1) if y_ticks is None else y_ticks)]
        # The title is left of the longest label.
        self._left = max(self._left, round(32 + _DIGIT * max((len(text) for _, text in rows), default=0)))
        left, right, floor = self._left, self.width - self._right, self.height - self._bottom
        for y, text in rows:
            at = self.py(y)
            self._parts.append(f'<path class="grid" d="M{left},{at:.1f}H{right}"/>')
            self.label(left - 8, at + 4, text, "tick end")
        for x in ticks(self._x0, self._x1, self.width // 110) if x_ticks is None else x_ticks:
            self._parts.append(f'<path class="axis" d="M{self.px(x):.1f},{floor}v5"/>')
            self.label(self.px(x), floor + 18, short(x), "tick middle")
        self._parts.append(f'<path class="axis" d="M{left},{floor}H{right}"/>')
        self.label((left + right) / 2, self.height - 6, x_label, "name middle")
        middle = (self._top + floor) / 2
        self._parts.append(
            f'<text class="name middle" transform="translate(14,{middle:.0f}) rotate(-90)">{escape(y_label)}</text>'
        )

    def label(self, px: float, py: float, text: str, kind: str = "") -> None:
        """Write text at a position in picture units."""
        self._parts.append(f'<text class="{kind}" x="{px:.1f}" y="{py:.1f}">{escape(text)}</text>')

    def line(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        path = _path((self.px(x), self.py(y)) for x, y in points)
        if path:
            self._parts.append(f'<path class="line {kind}" d="{path}"/>')

    def stairs(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a step line: each value holds until the next."""
        corners = [corner for (x, y), (then, _) in pairwise(points) for corner in ((x, y), (then, y))]
        self.line([*corners, *points[-1:]], kind)

    def band(self, points: Sequence[tuple[float, float, float]], kind: str) -> None:
        """Fill the area between low and high of points (x, low, high)."""
        if len(points) > 1:
            edge = [(x, high) for x, _, high in points] + [(x, low) for x, low, _ in reversed(points)]
            path = _path((self.px(x), self.py(y)) for x, y in edge)
            self._parts.append(f'<path class="band {kind}" d="{path}Z"/>')

    def point(self, x: float, y: float, kind: str, mark: int, *, aside: float = 0.0) -> None:
        """Draw a mark, shifted right by `aside` picture units."""
        self._parts.append(
            f'<path class="mark {kind}" transform="translate({self.px(x) + aside:.1f},{self.py(y):.1f})" '
            f'd="{MARKS[mark % len(MARKS)]}"/>'
        )

    def interval(self, x: float, low: float, high: float, kind: str, *, aside: float = 0.0) -> None:
        """Draw an error bar from low to high."""
        at, top, bottom = self.px(x) + aside, self.py(high), self.py(low)
        ends = f"M{at - 4:.1f},{top:.1f}h8M{at - 4:.1f},{bottom:.1f}h8M{at:.1f},{top:.1f}V{bottom:.1f}"
        self._parts.append(f'<path class="bar {kind}" d="{ends}"/>')

    def column(self, x: float, width: float, y: float, kind: str, *, aside: float = 0.0) -> None:
        """Draw a column from zero, centred at x, `width` picture units wide."""
        top, floor = self.py(y), self.py(self._y0)
        left = self.px(x) + aside - width / 2
        self._parts.append(rectangle(left, top, width, floor - top, kind))

    def upright(self, x: float, kind: str = "fault") -> None:
        """Draw a vertical line over the full height."""
        self._parts.append(f'<path class="{kind}" d="M{self.px(x):.1f},{self._top}V{self.height - self._bottom}"/>')

    @property
    def text(self) -> str:
        kind = "plot wide" if self.width > _NARROW else "plot"
        return picture(self._title, self.width, self.height, self._parts, kind)


def picture(title: str, width: float, height: float, parts: Iterable[str], kind: str = "") -> str:
    """An SVG element with a title for screen readers. kind: its CSS classes."""
    name, classes = escape(title, quote=True), f'class="{kind}" ' if kind else ""
    size = f"0 0 {width:.0f} {height:.0f}"
    return f'<svg {classes}viewBox="{size}" role="img" aria-label="{name}">{"".join(parts)}</svg>'


def standing_alone(svg: str, style: str, width: float, height: float) -> str:
    """The picture as a separate SVG file on white, with these CSS rules."""
    background = f'<style>{style}</style><rect width="{width}" height="{height}" fill="#fff"/>'
    before, _, after = svg.removeprefix("<svg ").partition(">")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {before}>{background}{after}\n'


def rectangle(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A filled rectangle in picture units; `title` is its tooltip."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'
    return f'<rect class="fill {kind}" {place}>{inside}</rect>'


class Label(NamedTuple):
    """Preferred position of a text in picture units. x: its left end; y: its middle; width: of the text,
    approximate."""

    x: float
    y: float
    width: float


def place_labels(wanted: Sequence[Label], step: float, low: float, high: float, most: float) -> list[float | None]:
    """Vertical positions of labels without overlap: for each the free one nearest to its y, within low..high.

    wanted: the most important first. step: height of a label. None for a label that would move by more than `most`.
    """
    placed: list[Label] = []
    heights: list[float | None] = []
    for label in wanted:
        near = [own.y for own in placed if own.x < label.x + label.width and label.x < own.x + own.width]
        start = min(max(label.y, low), high)
        places = sorted([start, *(y - step for y in near), *(y + step for y in near)], key=lambda y: abs(y - label.y))
        free = [y for y in places if low <= y <= high and all(abs(y - own) >= step for own in near)]
        height = free[0] if free and abs(free[0] - start) <= most else None
        if height is not None:
            placed.append(label._replace(y=height))
        heights.append(height)
    return heights


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "".join(f"{'L' if number else 'M'}{x:.1f},{y:.1f}" for number, (x, y) in enumerate(points))


def _wide(limits: tuple[float, float]) -> tuple[float, float]:
    """The limits, widened if they are equal."""
    low, high = limits
    return (low, high) if high > low else (low, low + 1.0)
