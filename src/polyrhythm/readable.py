"""Text for people: counted nouns, long lists cut short, and foreign text without control characters.

Foreign text comes from joined simulators, environments and their errors, datasets and models, and could control a
terminal. It is escaped at display: in log lines (`set_up_logging`), the status block, errors and summaries.
"""

from __future__ import annotations

import logging
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: Control characters that are displayed unchanged.
_HARMLESS = frozenset("\n\t\u200d")
#: Characters that may be control characters; most text has none of them.
_SUSPECT = re.compile(r"[^\n\t -~]")


def counted(count: int, noun: str) -> str:
    """`1 episode`, `2 episodes`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def three_digits(value: float) -> str:
    """`0.123`, `12.3`, `1,230`."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def few(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_path(tree: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested sections by dotted path; an empty section is a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from by_path(value, f"{within}{key}.")
        else:
            yield f"{within}{key}", value


def markdown_table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """A Markdown table of plain values; line ends within a cell become <br>."""
    head = list(columns)
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in (head, ["---"] * len(head), *rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("\n", "<br>")):
        text = text.replace(plain, escaped)
    return text


def visible(text: str) -> str:
    """Escape control characters in the text."""
    return _SUSPECT.sub(lambda found: _visible(found[0]), text)


def readable(text: str, most: int) -> str:
    """The escaped text, shortened to `most` characters: the first two thirds, the number left out, and the last
    third."""
    if len(text) > most:
        head = most * 2 // 3
        tail = most - head
        text = f"{text[:head]} [… {len(text) - most:,} characters …] {text[len(text) - tail :]}"
    return visible(text)


def _visible(character: str) -> str:
    if character in _HARMLESS or unicodedata.category(character)[0] != "C":
        return character
    return character.encode("unicode_escape").decode()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_up_logging(*, anew: bool = False) -> None:
    """Log to stderr in this process, unless logging is set up already; anew: even then."""
    if logging.getLogger().handlers and not anew:
        return
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=anew)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
