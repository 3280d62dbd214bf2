"""Text of others as it may be shown: control characters, which could rule a terminal, in escaped form.

Others are whoever joins, environments and their errors, data sets, models. What is shown goes through here at the last
moment: each line of a log (`set_up_logging`), of the status block, of an error and of a summary.
"""

from __future__ import annotations

import logging
import re
import sys
import unicodedata

#: Characters that are shown as they are, though Unicode has them among the control characters.
_HARMLESS = frozenset("\n\t\u200d")
#: Most text has none of these: controls, what is not ASCII.
_SUSPECT = re.compile(r"[^\n\t -~]")


def visible(text: str) -> str:
    """The text with control characters in escaped form."""
    return _SUSPECT.sub(lambda found: _visible(found[0]), text)


def readable(text: str, most: int) -> str:
    """The same; of a longer text than `most` characters the first two thirds and the last third of so many, and how
    many were left out."""
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
    """The time and the message, with a traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_up_logging(*, anew: bool = False) -> None:
    """Log to stderr in this process, unless something else was set up before; anew: even then."""
    if logging.getLogger().handlers and not anew:
        return
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, force=anew)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
