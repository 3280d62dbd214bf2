"""Lets another process of this Python import the same modules as this one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: The folder in which this package is found.
SOURCE = str(Path(__file__).parents[1])


def same_imports() -> dict[str, str]:
    """Environment variable with which another process finds the modules of this one, including changes of `sys.path`.

    The current folder, which `python -c` and `-m` put first, is not included.
    """
    return {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
