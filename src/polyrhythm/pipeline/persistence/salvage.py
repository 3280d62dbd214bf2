"""Reconstructs the progress of a run from its other files, if progress.json is missing or damaged."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyrhythm.config.recipes import read
from polyrhythm.errors import PolyrhythmError
from polyrhythm.observe.metrics import has_updates
from polyrhythm.pipeline.persistence.checkpoints import (
    DEMONSTRATIONS_FILE,
    POLICY_FILE,
    STATES,
    load_policy,
    saved_runs,
)
from polyrhythm.training.sft import Demonstrations

#: Keys of summary.json that belong to evaluation phases; the others belong to reinforcement learning.
_BEFORE, _AFTER = ("before", "before_sampled"), ("after", "after_sampled", "swapped")


def progress_found(folder: Path) -> dict[str, Any]:
    """{"done": {phase: result}, "wall_s": {phase: seconds}}, and "command" for a warm start alone.

    A phase counts as done if its file can be read; its result is as complete as the files allow.
    """
    done: dict[str, Any] = {}
    with suppress(PolyrhythmError):
        done["demonstrations"] = {"decisions": len(Demonstrations.load(folder / DEMONSTRATIONS_FILE))}
    if saved_runs(folder / STATES) or _version(folder / POLICY_FILE) is not None:
        done["warm_start"] = {}
    summary = _summary(folder / "summary.json")
    wall_s = summary.pop("wall_s", {})
    if "ledger" in summary:
        best = {"best": summary.pop("best")} if "best" in summary else {}
        before, after = ({name: summary.pop(name) for name in own if name in summary} for own in (_BEFORE, _AFTER))
        done |= {"evaluation_before": before} if before else {}
        done |= {"rl": summary, "best": best}
        done |= {"evaluation_after": after} if after else {}
    found: dict[str, Any] = {"done": done}
    if isinstance(wall_s, dict) and all(type(seconds) in (int, float) for seconds in wall_s.values()):
        found["wall_s"] = {phase: seconds for phase, seconds in wall_s.items() if phase != "total"}
    return {**found, **command_found(folder)}


def command_found(folder: Path) -> dict[str, str]:
    """{"command": "sft"} for a warm start alone, else {}.

    Recognized by the suffix that `sft` gives its runs, the supervised section, and the absence of checkpoints and
    metrics.
    """
    config = folder / "config.yaml"
    if not config.is_file() or (folder / STATES).exists() or (_version(folder / POLICY_FILE) or 0) > 0:
        return {}
    try:
        saved = read(config)
    except PolyrhythmError:
        return {}
    imitates = str(saved.get("name")).endswith("-sft") and saved.get("supervised") is not None
    return {"command": "sft"} if imitates and not has_updates(folder) else {}


def _version(path: Path) -> int | None:
    try:
        return load_policy(path)[2]
    except PolyrhythmError:
        return None


def _summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
