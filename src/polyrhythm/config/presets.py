"""Presets: named sets of settings for common training modes.

`preset: NAME` in a recipe overrides what the recipe extends and is overridden by the recipe itself; `preset=NAME` on
the command line overrides the recipe and is overridden by the other options. The resolved configuration has no preset.

Where a preset has `batching: dynamic`, `streams` serves as well, and a recipe that has it keeps it.
"""

from __future__ import annotations

import copy
from typing import Any

from polyrhythm.config.nearest import nearest
from polyrhythm.errors import ConfigError

Tree = dict[str, Any]

_DYNAMIC = {"type": "dynamic"}

#: Name → description and settings. The last four are the modes of verl's fully asynchronous trainer.
PRESETS: dict[str, tuple[str, Tree]] = {
    "lockstep": (
        "the synchronous baseline: rollout and training alternate, and the same seed gives the same bits",
        {
            "freshness": {"max_lag": 0.0, "sync_interval": 1, "on_update": "drain"},
            "batching": {"type": "lockstep"},
            "rollout": {"sharding": "whole", "routing": "fixed"},
            "training": {"streaming": False, "order": "ticket"},
        },
    ),
    "on_policy_pipeline": (
        "every sample comes from the weights that it trains; slots do not wait for each other",
        {"freshness": {"max_lag": 0.0, "sync_interval": 1, "on_update": "drain"}, "batching": _DYNAMIC},
    ),
    "stream_off_policy": (
        "four updates per version, each as soon as its samples are ready; no sample is older than its version",
        {
            "freshness": {"max_lag": 0.0, "sync_interval": 4, "on_update": "drain"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
    "stale_stream": (
        "rollout continues during training, but finishes its episodes before it loads new weights",
        {
            "freshness": {"max_lag": 1.0, "on_update": "drain"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
    "partial_rollout": (
        "as stale_stream, but unfinished episodes continue under new weights",
        {
            "freshness": {"max_lag": 1.0, "on_update": "continue"},
            "batching": _DYNAMIC,
            "training": {"streaming": True},
        },
    ),
}


def preset(name: Any, base: Tree, origin: str = "") -> Tree:
    """The settings of a preset, to lie over `base`. Raises ConfigError if there is none of this name."""
    if not isinstance(name, str) or name not in PRESETS:
        names = sorted(PRESETS)
        near = nearest(name, names) if isinstance(name, str) else ""
        raise ConfigError(f"preset = {name}: {near}presets are {', '.join(names)}", origin=origin)
    settings = copy.deepcopy(PRESETS[name][1])
    batching = base.get("batching")
    if isinstance(batching, dict) and batching.get("type") == "streams" and settings.get("batching") == _DYNAMIC:
        del settings["batching"]
    return settings
