"""Named modes: settings that belong together, as the field's systems bundle them.

`preset: NAME` in a recipe stands for these settings below its own and above what it extends; `preset=NAME` on the
command line lies over the recipe and below the other overrides. The resolved configuration knows no presets.
"""

from __future__ import annotations

import copy
from typing import Any

from polyrhythm.config.nearest import nearest
from polyrhythm.errors import ConfigError

Tree = dict[str, Any]

_DYNAMIC = {"type": "dynamic"}

#: Name → what it means, and its settings. The last four are the modes of verl's fully asynchronous trainer.
PRESETS: dict[str, tuple[str, Tree]] = {
    "lockstep": (
        "everybody waits for everybody, and the same seed gives the same bits: the synchronous baseline",
        {
            "freshness": {"max_lag": 0.0, "sync_interval": 1, "on_update": "drain"},
            "batching": {"type": "lockstep"},
            "rollout": {"sharding": "whole", "routing": "fixed"},
            "training": {"streaming": False, "order": "ticket"},
        },
    ),
    "on_policy_pipeline": (
        "every sample is of the weights that it trains; slots no longer wait for each other",
        {"freshness": {"max_lag": 0.0, "sync_interval": 1, "on_update": "drain"}, "batching": _DYNAMIC},
    ),
    "stream_off_policy": (
        "four updates a version, each as soon as its samples are there; no sample is older than its version",
        {
            "freshness": {"max_lag": 0.0, "sync_interval": 4, "on_update": "drain"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
    "stale_stream": (
        "rollout goes on while the trainer trains, but finishes its episodes before it takes new weights",
        {
            "freshness": {"max_lag": 1.0, "on_update": "drain"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
    "partial_rollout": (
        "the same, and unfinished episodes go on under new weights: nobody waits",
        {
            "freshness": {"max_lag": 1.0, "on_update": "continue"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
}


def preset(name: Any, origin: str = "") -> Tree:
    """The settings of a preset. ConfigError: there is none of this name."""
    if not isinstance(name, str) or name not in PRESETS:
        names = sorted(PRESETS)
        near = nearest(name, names) if isinstance(name, str) else ""
        raise ConfigError(f"preset = {name}: {near}presets are {', '.join(names)}", origin=origin)
    return copy.deepcopy(PRESETS[name][1])
