"""Saved states: written atomically, read without executing anything in the file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyrhythm.errors import RunFolderError
from polyrhythm.files import atomic_write


def save_state(state: Mapping[str, Any], path: Path) -> None:
    """Write plain data and tensors, atomically: a process killed meanwhile leaves the earlier file. OSError: cannot
    write."""
    with atomic_write(path) as unfinished, unfinished.open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:  # torch's own, with the file's behind it
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote. RunFolderError: the file is damaged, or no checkpoint."""
    if not zipfile.is_zipfile(path):
        raise RunFolderError(f"{path} cannot be read as a checkpoint: it is damaged, or something else; name another")
    try:
        with zipfile.ZipFile(path) as parts:
            damaged = parts.testzip()  # torch does not verify the checksums that it writes
        if damaged is not None:
            raise ValueError(f"{damaged} in it is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes may raise anything
        raise RunFolderError(f"{path} cannot be read as a checkpoint ({error}); name another") from error
    if not isinstance(state, dict):
        raise RunFolderError(f"{path} cannot be read as a checkpoint: it holds {type(state).__name__}; name another")
    return state
