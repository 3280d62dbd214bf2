"""Positions beyond the range in which a simulator places its objects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

#: Width of the shell around a range, in shares of its extent.
_MARGIN = 0.25

Vector = NDArray[np.float64]


def draw_beyond(
    uniform: Callable[[Vector, Vector], Vector], low: Vector, high: Vector, free: NDArray[np.bool_]
) -> Vector:
    """Coordinates from a shell around low..high: outside of it in one of the `free` ones at least, if there are any, by
    up to a quarter of its extent; the others stay within. uniform: draws between two vectors."""
    margin = np.where(free, _MARGIN * (high - low), 0.0)
    while True:
        drawn = uniform(low - margin, high + margin)
        if not free.any() or ((drawn < low) | (drawn > high))[free].any():
            return drawn
