"""Numbers that are not finite: where they are, and who is to blame for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Who can give numbers that are not finite.
POLICY, ENVIRONMENT = "policy", "environment"


def not_finite_reason(culprit: str, what: str) -> str:
    """The reason why a sample fails: `policy: logprob is not finite`. It holds no numbers, so that the same fault
    counts as one kind however often it occurs. culprit: POLICY or ENVIRONMENT."""
    return f"{culprit}: {what} is not finite"


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no entry is NaN or infinite; numbers of any dtype.

    Float32 in one piece is asked for its sum of squares first, in a third of the time: it is finite only if all are.
    """
    if values.dtype == np.float32 and values.flags.c_contiguous:
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # finite numbers above 1.8e19 overflow: look at each
            if math.isfinite(np.dot(flat, flat)):
                return True
    return int(np.count_nonzero(np.isfinite(values))) == values.size


def first_not_finite(arrays: Mapping[str, NDArray[Any]]) -> dict[int, str]:
    """Rows of arrays [n, ...] that hold NaN or infinity → the name of the first array where they do; mostly empty.

    Example: {"a": [[1, nan], [2, 3]], "b": [inf, inf]} → {0: "a", 1: "b"}.
    """
    found: dict[int, str] = {}
    for name, values in arrays.items():
        if not is_finite(values):
            bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
            found = dict.fromkeys(np.flatnonzero(bad).tolist(), name) | found
    return found
