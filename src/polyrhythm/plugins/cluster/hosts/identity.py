"""A host's folder of shared memory: its token, by which others know that they share it, and its removal in the end.

Two processes share memory if the one opens the other's folder and finds the token that the other wrote. Addresses and
names of machines say nothing about it: containers of one machine have different ones and may share memory or not.
Ray kills the children of an actor that it ends, so an agent has no time to remove what it made: a shell does.
"""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_IDENTITY = "identity"


@dataclass(frozen=True, slots=True)
class Known:
    """A host of the run. folder: the name of the run's folder there; token: what was written into it."""

    host: str
    folder: str
    token: str


def write_identity(folder: Path) -> str:
    """Write a new token into the folder."""
    token = secrets.token_hex(16)
    file = folder / _IDENTITY
    file.touch(mode=0o600)
    file.write_text(token)
    return token


def find_shared(known: Iterable[Known], root: Path) -> tuple[Known, Path] | None:
    """The first of these hosts whose memory can be opened below `root`, and its folder; None if there is none."""
    for host in known:
        folder = root / host.folder
        if folder.parent != root:
            continue
        try:
            found = (folder / _IDENTITY).read_text()
        except (OSError, ValueError):
            continue
        if found == host.token:
            return host, folder
    return None


#: Its input ends when the process does that has the other end of it.
_SCRIPT = 'trap "" HUP INT TERM; cat > /dev/null; rm -rf -- "$1"'


def start_cleaner(path: Path) -> subprocess.Popen[bytes]:
    """A shell that removes the path once this process has ended. As a context it ends with that, the path too.

    It has none of this process's output: who reads that, as `tee` does, waits until all who have it have ended."""
    words, none = ["/bin/sh", "-c", _SCRIPT, "sh", str(path)], subprocess.DEVNULL
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=none, stderr=none, start_new_session=True)  # noqa: S603
