"""Finds NaN and infinity in arrays, and describes them as the error of a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Sources of non-finite numbers.
POLICY, ENVIRONMENT = "policy", "environment"


def describe_not_finite(culprit: str, what: str) -> str:
    """Error of a failed sample: `policy: logprob is not finite`. Without numbers, so that equal faults are counted
    together. culprit: POLICY or ENVIRONMENT."""
    return f"{culprit}: {what} is not finite"


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no entry is NaN or infinite; numbers of any dtype.

    For contiguous float32 it first computes the sum of squares, in a third of the time: finite only if all entries are.
    """
    if values.dtype == np.float32 and values.flags.c_contiguous:
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # finite numbers above 1.8e19 overflow: check each below
            if math.isfinite(np.dot(flat, flat)):
                return True
    return int(np.count_nonzero(np.isfinite(values))) == values.size


def first_not_finite(arrays: Mapping[str, NDArray[Any]]) -> dict[int, str]:
    """Row of arrays [n, ...] with NaN or infinity → name of the first array that has it; usually empty.

    Example: {"a": [[1, nan], [2, 3]], "b": [inf, inf]} → {0: "a", 1: "b"}.
    """
    found: dict[int, str] = {}
    for name, values in arrays.items():
        if not is_finite(values):
            bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
            found = dict.fromkeys(np.flatnonzero(bad).tolist(), name) | found
    return found
