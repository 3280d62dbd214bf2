"""Polyrhythm: asynchronous reinforcement-learning post-training of robot policies.

The public API, documented in docs/python-api.md, is imported on first use, so that `import polyrhythm` and the command
line's help load neither torch nor pydantic.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
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

__version__ = "0.2.0"

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

#: Packages and modules that users import, by their names before 0.2.
_MOVED = {
    "polyrhythm.training.sft": "polyrhythm.plugins.demonstrations.imitation",
    "polyrhythm.envs.conformance": "polyrhythm.plugins.trial.env_contract",
    "polyrhythm.envs.variants": "polyrhythm.envs.base",
    "polyrhythm.policies.conformance": "polyrhythm.plugins.trial.policy_contract",
    "polyrhythm.envs.text": "polyrhythm.plugins.language.text",
    "polyrhythm.policies.vla": "polyrhythm.plugins.vla",
    "polyrhythm.runtime.memory.payloads": "polyrhythm.runtime.launcher",
    "polyrhythm.workflow": "polyrhythm.plugins.workflow",
}


def _new_name(name: str) -> str:
    """The present name of a module of a moved package; "" for any other module."""
    return next((new + name.removeprefix(old) for old, new in _MOVED.items() if f"{name}.".startswith(f"{old}.")), "")


class _Moved(MetaPathFinder, Loader):
    """Imports a moved package's modules by their old names, with a DeprecationWarning that has the new name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002 - the interface
        return ModuleSpec(name, self, is_package=True) if _new_name(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = _new_name(spec.name)
        try:
            content = vars(importlib.import_module(name)).items()
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            package = name.rpartition(".")[0]
            message = f"{spec.name} is gone; import what you need from {package} or one of its modules"
            raise ModuleNotFoundError(message, name=name) from error
        warnings.warn(f"{spec.name} is now {name}; import that", DeprecationWarning, stacklevel=2)
        module = ModuleType(spec.name)
        own = vars(module) | {"__path__": None}
        module.__dict__.update({key: value for key, value in content if key not in own or key == "__doc__"})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` has filled the module."""


sys.meta_path.append(_Moved())


def __getattr__(name: str) -> Any:
    if name == "Checked":
        raise AttributeError("polyrhythm.Checked is now called polyrhythm.ValidatedRun")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyrhythm import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
