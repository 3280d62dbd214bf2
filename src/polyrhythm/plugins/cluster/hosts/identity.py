"""Whether two processes share memory: the one opens the other's folder and finds the token that the other wrote.

Addresses and names of machines say nothing about it: containers of one machine have different ones and may share memory
or not.
"""

from __future__ import annotations

import secrets
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
