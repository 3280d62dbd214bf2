"""Records settings that were changed when a run was resumed: `settings_changes.jsonl`, one object a line.

    {"time": ISO 8601, "update": 40, "changes": {"training.versions": [120, 200]}}

The updates from `update` on, counted from 0, were trained under the new settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from polyrhythm.files import atomic_write

CHANGES_FILE = "settings_changes.jsonl"


class Change(NamedTuple):
    """A changed setting, with the first update under the new value."""

    time: str
    update: int
    setting: str
    before: Any
    after: Any


def read_changes(folder: Path) -> list[Change]:
    """All changes of the run in `folder`, oldest first; damaged lines are left out."""
    return [
        Change(str(entry["time"]), entry["update"], setting, *values)
        for entry in _entries(folder / CHANGES_FILE)
        for setting, values in entry["changes"].items()
    ]


def note_changes(folder: Path, update: int, changes: Mapping[str, tuple[Any, Any]], now: datetime) -> None:
    """Append changes {setting: (before, after)}, if there are any, to those of the run in `folder`.

    The run resumes at `update`: earlier changes recorded after it are moved to `update`.
    """
    path = folder / CHANGES_FILE
    noted = [{**entry, "update": min(entry["update"], update)} for entry in _entries(path)]
    if changes:
        noted.append({"time": now.isoformat(timespec="seconds"), "update": update, "changes": dict(changes)})
    if noted:
        with atomic_write(path) as unfinished:
            unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in noted), encoding="utf-8")


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The lines that are not damaged."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        try:
            entry = json.loads(line)
            if type(entry["update"]) is int and all(len(values) == 2 for values in entry["changes"].values()):
                yield {"time": "", **entry}
        except (AttributeError, LookupError, TypeError, ValueError):
            continue
