"""Moves on a grid, as words of a message."""

from __future__ import annotations

import re

#: Moves by Gymnasium's number, with rows and columns.
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_MOVE = re.compile("|".join(MOVES))


def last_move(message: str) -> str | None:
    """The last of the words left, down, right and up in a message, None without one."""
    found = _MOVE.findall(message)
    return found[-1] if found else None
