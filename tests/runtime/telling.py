"""A station that says, in a file of the folder where the run works, how its process was started."""

from __future__ import annotations

import contextlib
import json
import os
import sys
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
        said = {
            "forked": os.getpid() != IMPORTED_BY,
            "parent": os.getppid(),
            "session": os.getsid(0),
            "command": psutil.Process().cmdline(),
            "draw": float(np.random.random()),
            "setting": os.environ.get("A_SETTING", ""),
            "path": sys.path,
            "specs": _open_files().count("/memfd:spec (deleted)"),
        }
        Path(f"{self.name}.{incarnation}.json").write_text(json.dumps(said))
        return [(f"{self.name}.{incarnation}.0", lambda: Scripted(self.name, incarnation, context))]
