"""Removes a folder of shared memory, or a file, after the process that made it, also one that is killed.

Ray kills the children of an actor that it ends, so an agent has no time to remove what it made.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

#: Its input ends when the process does that has the other end of it.
_SCRIPT = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$1"'


def start_cleaner(path: Path) -> subprocess.Popen[bytes]:
    """A shell that removes the path once this process has ended. As a context it ends with that, the path too.

    It has none of this process's output: who reads that, as `tee` does, waits until all who have it have ended."""
    words, none = ["/bin/sh", "-c", _SCRIPT, "sh", str(path)], subprocess.DEVNULL
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True)  # noqa: S603
