"""Small real runs: CartPole, a categorical policy, a few updates."""

from __future__ import annotations

from typing import Any

from polyrhythm.config.load import merge, validate
from polyrhythm.config.schema import RunConfig

ROWS = 6

LOCKSTEP: dict[str, Any] = {
    "name": "test",
    "seed": 3,
    "launcher": "inline",
    "env": {"type": "gymnasium", "id": "CartPole-v1", "max_steps": 40},
    "policy": {"type": "categorical", "hidden": 16},
    "rollout": {"rows": ROWS, "routing": "fixed"},
    "batching": {"type": "lockstep"},
    "freshness": {"max_lag": 0, "on_update": "drain"},
    "training": {
        "versions": 3,
        "mini_batch_samples": 10,
        "order": "ticket",
        "epochs": 2,
        "minibatch_steps": 64,
        "optimizer": {"lr": 3e-3},
    },
}


def config(**changes: Any) -> RunConfig:
    """The lock-step run, with changes by section."""
    return validate(merge(LOCKSTEP, changes))
