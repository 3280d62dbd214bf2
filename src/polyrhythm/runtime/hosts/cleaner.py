"""Removes the memory of processes that were killed: an agent's, and main's.

Ray kills the children of an actor that it ends, so an agent has no time to remove what it made: a shell does that.
Main's folder is removed by its agent.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from polyrhythm.runtime.memory.shared_folder import remove_orphan

#: Its input ends when the process does that has the other end of it.
_SCRIPT = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$1"'
#: Seconds that all threads of a killed process may take to end, until which its folder stays locked; between two looks.
_ENDS_S, _LOOK_S = 5.0, 0.05


def start_cleaner(folder: Path) -> subprocess.Popen[bytes]:
    """A shell that removes the folder once this process has ended. As a context it ends with that, the folder too."""
    words = ["/bin/sh", "-c", _SCRIPT, "sh", str(folder)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603


def removal_of_mains(
    folder: Path,
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    """For an exit stack: removes main's folder, unless this process ends by `sys.exit(0)`, as main has told it to."""

    def leave(_type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, SystemExit) and not error.code:
            return
        until = time.monotonic() + _ENDS_S
        while not remove_orphan(folder) and folder.exists() and time.monotonic() < until:
            time.sleep(_LOOK_S)

    return leave
