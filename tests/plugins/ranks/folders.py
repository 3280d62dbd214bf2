"""A trainer's state as sharded ranks save it, made by one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.plugins.ranks.shards import save_folder


def save_as_folder(state: Mapping[str, Any], folder: Path) -> Path:
    """Write the state into this folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # one process needs none
        save_folder(state, folder, 0, None).wait()  # type: ignore[arg-type]
    return folder
