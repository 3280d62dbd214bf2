"""What the files of a run say of how far it has come, where its progress.json is damaged or gone."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyrhythm.errors import PolyrhythmError
from polyrhythm.pipeline.checkpoints import POLICY_FILE, STATES, load_policy, saved_runs
from polyrhythm.pipeline.warm_start import DEMONSTRATIONS_FILE
from polyrhythm.training.demonstrations import Demonstrations

#: The parts of summary.json that are a phase's; what else is there is of reinforcement learning.
_BEFORE, _AFTER = ("before", "before_sampled"), ("after", "after_sampled", "swapped")


def progress_found(folder: Path) -> dict[str, Any]:
    """{"done": {phase: result}, "wall_s": {phase: seconds}} and, for a warm start alone, "command".

    A phase counts as done where the file that it makes can be read; its result is as much as is known of it.
    """
    done: dict[str, Any] = {}
    with suppress(PolyrhythmError):
        done["demonstrations"] = {"decisions": len(Demonstrations.load(folder / DEMONSTRATIONS_FILE))}
    if saved_runs(folder / STATES) or _is_policy(folder / POLICY_FILE):
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
    if _is_warm_start(folder):
        found["command"] = "sft"
    return found


def _is_policy(path: Path) -> bool:
    try:
        load_policy(path)
    except PolyrhythmError:
        return False
    return True


def _is_warm_start(folder: Path) -> bool:
    """`sft` ends before anything is saved there, and gives its runs a name of their own."""
    config = folder / "config.yaml"
    if not config.is_file() or (folder / STATES).exists():
        return False
    first = config.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
    return first.startswith("name:") and first.rstrip().endswith("-sft")


def _summary(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
