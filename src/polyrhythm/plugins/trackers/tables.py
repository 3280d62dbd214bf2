"""Tables as text, for trackers that have none."""

from __future__ import annotations

from typing import Any

from polyrhythm.plugins.trackers.sink import Table


def as_markdown(table: Table) -> str:
    """A Markdown table; line ends within a cell become <br>."""
    lines = [_row(table.columns), _row(["---"] * len(table.columns)), *map(_row, table.rows)]
    return "\n".join(lines)


def _row(cells: Any) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(plain, escaped)
    return text
