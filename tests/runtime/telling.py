"""A station that says, in a file of the folder where the run works, how its process was started.

A template that has imported this has a root logger of its own; and while there is a file named `LATE`, its forks come
late.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
from tests.runtime.scripted import Scripted, ScriptedFactory

from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.messages import Station

#: The process that has imported this.
IMPORTED_BY = os.getpid()
LATE, LATE_S = "late", 60.0
_forks = itertools.count(1)


def _come_late() -> None:
    """In the second of two forks, which is the station's process; its parent has ended by now."""
    if next(_forks) == 2 and Path(LATE).exists():
        time.sleep(LATE_S)


if Path(sys.argv[0]).name == "template.py":
    os.register_at_fork(after_in_child=_come_late)
    logging.getLogger().addHandler(logging.NullHandler())


def _open_files() -> list[str]:
    links = []
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this reading
            links.append(str(file.readlink()))
    return links


@dataclass(frozen=True)
class TellingFactory(ScriptedFactory):
    preload: ClassVar = (__name__,)

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        files = _open_files()
        sockets = sum(name.startswith("socket:") for name in files)
        said = {
            "forked": os.getpid() != IMPORTED_BY,
            "parent": os.getppid(),
            "session": os.getsid(0),
            "command": psutil.Process().cmdline(),
            "draw": float(np.random.random()),
            "setting": os.environ.get("A_SETTING", ""),
            "path": sys.path,
            "argv": sys.argv[1:],
            "logs": logging.getLogger().isEnabledFor(logging.INFO),
            "files": len(files) - sockets,
            "sockets": sockets,
            "specs": files.count("/memfd:spec (deleted)"),
        }
        Path(f"{self.name}.{incarnation}.json").write_text(json.dumps(said))
        return [(f"{self.name}.{incarnation}.0", lambda: Scripted(self.name, incarnation, context))]
