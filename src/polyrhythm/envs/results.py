"""The form of what an environment returns: of a step's result, and of texts."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyrhythm.conformance import ContractViolation
from polyrhythm.envs.base import StepResult


def as_utf8(text: str) -> str:
    """The text without lone surrogates, which no message can carry."""
    return text.encode(errors="replace").decode()


def check_form(result: object, rows: int, metrics: Collection[str], chunk: int = 0) -> None:
    """Raise ContractViolation unless this is a StepResult of [rows] numbers and flags, with [rows] numbers for each
    of these metrics, and with `executed` [rows,chunk] where a step takes a chunk."""
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
    success: NDArray[Any] = np.asarray(result.success)
    if isinstance(result.success, np.ndarray) and success.dtype == np.int8 and np.isin(success, (-1, 0, 1)).all():
        flags["success"] = success > 0
    if chunk or result.executed is not None:
        _check_executed(result.executed, rows, chunk)
    for name, array in {**numbers, **flags}.items():
        kinds, dtype = ("b", "bool") if name in flags else ("fiub", "float32")
        found = np.asarray(array)
        if not isinstance(array, np.ndarray) or found.shape != (rows,) or found.dtype.kind not in kinds:
            raise ContractViolation(
                f"step returned {name} as {type(array).__name__} of shape {list(found.shape)} and {found.dtype}",
                f"return an array of shape [{rows}] and {dtype}",
            )


def _check_executed(executed: object, rows: int, chunk: int) -> None:
    if not chunk:
        raise ContractViolation("step returned executed, the spec has no chunk", "leave it out, or set the chunk")
    if not isinstance(executed, np.ndarray) or executed.shape != (rows, chunk) or executed.dtype != np.bool_:
        found = np.asarray(executed)
        raise ContractViolation(
            f"step returned executed as {type(executed).__name__} of shape {list(found.shape)} and {found.dtype}",
            f"return an array of shape [{rows}, {chunk}] and bool",
        )
    if not executed[:, 0].all() or (executed[:, 1:] & ~executed[:, :-1]).any():
        raise ContractViolation(
            "step returned executed with a gap", "it is true for the first actions of each row, one or more, only"
        )
