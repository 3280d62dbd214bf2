"""Wraps the prose of generated Markdown pages to the line length that tests/test_prose.py checks."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120
_VERBATIM = re.compile(r"\s*(\||!\[|#|```)|\s*$")
_ITEM = "- "


def wrap_prose(text: str) -> str:
    """The page with each paragraph and list item filled to 120 characters; tables, images and headings as they are."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in text.splitlines():
        verbatim = _VERBATIM.match(line)
        if verbatim or line.startswith(_ITEM):
            lines += _fill(paragraph)
            paragraph = []
        if verbatim:
            lines.append(line)
        else:
            paragraph.append(line.strip())
    return "\n".join([*lines, *_fill(paragraph), ""])


def _fill(paragraph: list[str]) -> list[str]:
    text = " ".join(paragraph)
    indent = "  " if text.startswith(_ITEM) else ""
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
