"""Lets another process of this Python import what this one can."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: The folder in which this package is found.
SOURCE = str(Path(__file__).parents[1])


def same_imports() -> dict[str, str]:
    """The variable of the environment with which a process finds modules where this one does, also where `sys.path` was
    changed since the start. The current folder, which `python -c` and `-m` put first, is each process's own."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
