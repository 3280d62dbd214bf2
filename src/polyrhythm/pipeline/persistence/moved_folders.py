"""Folders of a released policy that a run names and that may lie elsewhere later: its checkpoint and its tokenizer.

Whether the new folder is of the same policy is told by its headers (`form` compares them) and by the run's own weights,
whose names and shapes have to be those of the policy built on it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import MissingError

#: Settings of the section `policy` that name such folders.
_FOLDERS = ("checkpoint", "tokenizer")
MOVABLE = frozenset(f"policy.{key}" for key in _FOLDERS)


def movable(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    """Those settings that name a folder in both sections `policy`: only there a change may be a move."""
    return frozenset(f"policy.{key}" for key in _FOLDERS if _is_folder(before.get(key)) and _is_folder(after.get(key)))


def refuse_missing_folders(config: RunConfig, command: str, run: Path, began_in: str | None = None) -> None:
    """MissingError with the remedy if such a folder is not there. command: that would use the run; began_in: another
    working folder, to which relative paths belong."""
    for key in _FOLDERS:
        folder = getattr(config.policy, key, "")
        if not _is_folder(folder) or Path(folder).expanduser().exists():
            continue
        start = f", or start this in {began_in}, where the run began" if began_in else ""
        words = shlex.join(["polyrhythm", command, str(run), f"policy.{key}=NEW"])
        raise MissingError(
            f"policy.{key} = {folder}: there is no such folder here; name where it is now: {words}{start}"
        )


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and value not in ("", "words")
