"""Checks arrays for NaN and infinity, formats the error of a sample, and converts values of any type to numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Maximum number of float32 summed one by one in Python: a third of numpy's time, half of that on a core that has just
#: slept; and, unlike `np.dot`, it does not release the interpreter's lock to another thread.
_FEW = 64

#: Sources of non-finite numbers.
POLICY, ENVIRONMENT = "policy", "environment"


def describe_not_finite(culprit: str, what: str) -> str:
    """Error of a failed sample: `policy: logprob is not finite`. culprit: POLICY or ENVIRONMENT. It contains no
    numbers, so that equal faults are counted together."""
    return f"{culprit}: {what} is not finite"


def as_number(value: object) -> float:
    """The value as a float; NaN if it is a text or not a number."""
    try:
        return math.nan if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def is_finite(values: NDArray[Any]) -> bool:
    """Whether all entries are finite; any numeric dtype.

    A few float32 are finite exactly if their float64 sum is. More contiguous ones are first tested by their sum of
    squares, which is finite only if all entries are, in a third of the time.
    """
    if values.dtype == np.float32 and values.size <= _FEW:
        return math.isfinite(sum(values.ravel().tolist()))
    if values.dtype == np.float32 and values.flags.c_contiguous:
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # finite numbers above 1.8e19 overflow: check each below
            if math.isfinite(np.dot(flat, flat)):
                return True
    return int(np.count_nonzero(np.isfinite(values))) == values.size


class RecordCheck:
    """Checks all floating fields of records of one dtype at once."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        fields = {name: dtype[name].base for name in dtype.names or ()}
        self._floating = [name for name, field in fields.items() if field.kind == "f"]
        # Half-precision numbers could be NaN without their float32 word being it; float64's upper word always is.
        words = dtype.itemsize % 4 == 0 and dtype.alignment % 4 == 0
        self._as_words = words and all(fields[name].itemsize in (4, 8) for name in self._floating)

    def first_not_finite(self, records: NDArray[np.void]) -> dict[int, str]:
        """Index of each record [n] with NaN or infinity → its first such field. records: contiguous.

        All bytes are first read as float32: a non-finite floating field is also non-finite there. Integers may look
        non-finite too (-1 does); then each field is checked.
        """
        if self._as_words and is_finite(records.view(np.float32)):
            return {}
        return first_not_finite({name: records[name] for name in self._floating})


def first_not_finite(arrays: Mapping[str, NDArray[Any]]) -> dict[int, str]:
    """Row of arrays [n, ...] with NaN or infinity → name of the first such array; usually empty. Example: {"a": [[1,
    nan], [2, 3]], "b": [inf, inf]} → {0: "a", 1: "b"}."""
    found: dict[int, str] = {}
    for name, values in arrays.items():
        if not is_finite(values):
            bad = ~np.isfinite(values).reshape(len(values), -1).all(1)
            found = dict.fromkeys(np.flatnonzero(bad).tolist(), name) | found
    return found
