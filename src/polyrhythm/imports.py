"""Lets another process of this Python import what this one can."""

from __future__ import annotations

import os
import sys


def same_imports() -> dict[str, str]:
    """The variable of the environment with which a process finds modules where this one does: its path of imports, the
    current folder and what `sys.path` was given since the start included."""
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
