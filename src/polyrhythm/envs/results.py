"""Checks the form of an environment's step result."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import StepResult


def check_form(result: object, rows: int, metrics: Collection[str]) -> None:
    """Raise ContractViolation unless this is a StepResult of [rows] numbers and flags, with [rows] numbers for each
    of these metrics."""
    if not isinstance(result, StepResult):
        raise ContractViolation(
            f"step returned a {type(result).__name__}", "return StepResult(reward, terminated, truncated, success)"
        )
    if set(result.metrics) != set(metrics):
        raise ContractViolation(
            f"step returned the metrics {sorted(result.metrics)}, the spec declares {sorted(metrics)}",
            "make them equal (NaN for a step without a value)",
        )
    numbers = {"reward": result.reward, **{f"metrics[{name}]": array for name, array in result.metrics.items()}}
    flags = {"terminated": result.terminated, "truncated": result.truncated, "success": result.success}
    for name, array in {**numbers, **flags}.items():
        kinds, dtype = ("b", "bool") if name in flags else ("fiub", "float32")
        found = np.asarray(array)
        if not isinstance(array, np.ndarray) or found.shape != (rows,) or found.dtype.kind not in kinds:
            raise ContractViolation(
                f"step returned {name} as {type(array).__name__} of shape {list(found.shape)} and {found.dtype}",
                f"return an array of shape [{rows}] and {dtype}",
            )
