"""Converts an `EnvSpec` to and from plain data, for files: a saved policy contains its spec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from polyrhythm.specs.spaces import ActionSpec, ArraySpec, EnvSpec, Task


def as_plain(spec: EnvSpec) -> dict[str, Any]:
    """The spec as dicts, lists, strings, numbers and flags; `from_plain` restores it."""
    content = {
        "observation": {
            name: {"shape": array.shape, "dtype": np.dtype(array.dtype).name}
            for name, array in spec.observation.items()
        },
        "action": asdict(spec.action),
        "tasks": [asdict(task) for task in spec.tasks],
        "max_steps": spec.max_steps,
        "reset_rows": bool(spec.reset_rows),
        "step_rows": bool(spec.step_rows),
        "metrics": dict(spec.metrics),
        "reports_success": spec.reports_success,
        "initial_states": spec.initial_states,
        "chunk": spec.chunk,
        "training_states": spec.training_states,
        "data": spec.data,
    }
    plain: dict[str, Any] = json.loads(json.dumps(content, default=int))  # sizes may be numpy integers
    return plain


def from_plain(content: Mapping[str, Any]) -> EnvSpec:
    """Restore a spec. Raises KeyError, TypeError or ValueError if the content is not one."""
    observation = {
        name: ArraySpec(tuple(array["shape"]), array["dtype"]) for name, array in content["observation"].items()
    }
    tasks = tuple(Task(**task) for task in content["tasks"])
    made = {"observation": observation, "action": ActionSpec(**content["action"]), "tasks": tasks}
    made["metrics"] = dict(content.get("metrics", {}))  # absent in old files
    return EnvSpec(**{name: value for name, value in {**content, **made}.items() if name != "splits"})  # in old files
