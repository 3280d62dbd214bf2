"""Polyrhythm: asynchronous reinforcement-learning post-training of robot policies.

The public API, documented in docs/python-api.md, is imported on first use, so that `import polyrhythm` and the command
line's help load neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrhythm.api import (
        Callback,
        EvaluationResult,
        PolyrhythmError,
        RunConfig,
        StandalonePolicy,
        StopTraining,
        TrainResult,
        ValidatedRun,
        check,
        evaluate,
        export,
        load_policy,
        load_recipe,
        report,
        resume,
        train,
    )

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "EvaluationResult",
    "PolyrhythmError",
    "RunConfig",
    "StandalonePolicy",
    "StopTraining",
    "TrainResult",
    "ValidatedRun",
    "__version__",
    "check",
    "evaluate",
    "export",
    "load_policy",
    "load_recipe",
    "report",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "Checked":
        raise AttributeError("polyrhythm.Checked is now called polyrhythm.ValidatedRun")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyrhythm import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
