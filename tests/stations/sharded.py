"""A trainer's state as sharded ranks save it, made by one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyrhythm.training.sharded_checkpoint import save_sharded


def save_as_folder(state: Mapping[str, Any], folder: Path) -> Path:
    """Write the state into this folder."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")  # one process needs none
        save_sharded(state, folder, 0, None).wait()  # type: ignore[arg-type]
    return folder
