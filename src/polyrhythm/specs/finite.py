"""Numbers that are not finite: where they are, and who is to blame for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: So few float32 are added up one by one, at most. For them that takes a third of numpy's time, and half of that where
#: the core has just slept; and, unlike `np.dot`, it does not hand the interpreter's lock to another thread.
_FEW = 64

#: Who can give numbers that are not finite.
POLICY, ENVIRONMENT = "policy", "environment"


def not_finite_reason(culprit: str, what: str) -> str:
    """The reason why a sample fails: `policy: logprob is not finite`. It holds no numbers, so that the same fault
    counts as one kind however often it occurs. culprit: POLICY or ENVIRONMENT."""
    return f"{culprit}: {what} is not finite"


def is_finite(values: NDArray[Any]) -> bool:
    """Whether no entry is NaN or infinite; numbers of any dtype.

    A few float32 are finite exactly if their sum in float64 is. More of them, in one piece, are asked for their sum of
    squares first, in a third of the time: it is finite only if all are.
    """
    if values.dtype == np.float32 and values.size <= _FEW:
        return math.isfinite(sum(values.ravel().tolist()))
    if values.dtype == np.float32 and values.flags.c_contiguous:
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):  # finite numbers above 1.8e19 overflow: look at each
            if math.isfinite(np.dot(flat, flat)):
                return True
    return int(np.count_nonzero(np.isfinite(values))) == values.size


class RecordCheck:
    """Looks at all floating fields of records of one dtype at once."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        fields = {name: dtype[name].base for name in dtype.names or ()}
        self._floating = [name for name, field in fields.items() if field.kind == "f"]
        # Half-precision numbers could be NaN without their float32 word being it; float64's upper word always is.
        words = dtype.itemsize % 4 == 0 and dtype.alignment % 4 == 0
        self._as_words = words and all(fields[name].itemsize in (4, 8) for name in self._floating)

    def first_not_finite(self, records: NDArray[np.void]) -> dict[int, str]:
        """Place of each record [n], in one piece, that holds NaN or infinity → its first field that does.

        All bytes are read as float32 first. What is not finite in a floating field is not finite there either; whole
        numbers may seem so too (-1 does), and then each field is asked.
        """
        if self._as_words and is_finite(records.view(np.float32)):
            return {}
        return first_not_finite({name: records[name] for name in self._floating})


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
