"""Whether what an environment's step returned has the form that the contract asks for."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import StepResult


def check_form(result: object, rows: int, metrics: Collection[str]) -> None:
    """ContractViolation unless this is a StepResult of [rows] numbers and flags, and of a [rows] number for each of
    these metrics."""
    if not isinstance(result, StepResult):
        raise ContractViolation(
            f"step gave a {type(result).__name__}", "return StepResult(reward, terminated, truncated, success)"
        )
    if set(result.metrics) != set(metrics):
        raise ContractViolation(
            f"step gave the metrics {sorted(result.metrics)}, the spec declares {sorted(metrics)}",
            "make them equal (NaN says that a step has no number)",
        )
    numbers = {"reward": result.reward, **{f"metrics[{name}]": array for name, array in result.metrics.items()}}
    flags = {"terminated": result.terminated, "truncated": result.truncated, "success": result.success}
    for name, array in {**numbers, **flags}.items():
        kinds, wanted = ("b", "bool") if name in flags else ("fiub", "float32")
        found = np.asarray(array)
        if not isinstance(array, np.ndarray) or found.shape != (rows,) or found.dtype.kind not in kinds:
            raise ContractViolation(
                f"step gave {name} as {type(array).__name__} of shape {list(found.shape)} and {found.dtype}",
                f"return an array of shape [{rows}] and {wanted}",
            )
