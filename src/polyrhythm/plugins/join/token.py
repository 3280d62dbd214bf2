"""The token of a run: what a simulator needs to join it, in a file that only its owner can read.

    polyrhythm-join-1 PUBLIC_KEY_OF_THE_RUN PUBLIC_KEY SECRET_KEY

The keys are CURVE keys in Z85, made for the run. They open its join ports and nothing else of it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from polyrhythm.errors import StartError
from polyrhythm.runtime.transport.authentication import KeyPair, RunKeys

_KIND = "polyrhythm-join-1"
#: Characters of a key in Z85; bytes of a file that can be a token.
_KEY, _LARGEST = 40, 4096


def write_token(path: Path, keys: RunKeys) -> None:
    """Write the token with mode 0600; a file of that name is replaced."""
    words = (_KIND, *(key.decode() for key in (keys.inbox.public, keys.outbox.public, keys.outbox.secret)))
    unfinished = path.with_name(f".{path.name}.part")
    unfinished.unlink(missing_ok=True)
    file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as out:
        out.write(" ".join(words) + "\n")
    unfinished.replace(path)


def read_token(path: Path) -> RunKeys:
    """The keys for joining; the run's secret one is not among them. StartError: the file is none, or others can read
    it."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise StartError(f"--token-file = {path}: {error.strerror}; copy the file that the run names") from error
    if stat.S_IMODE(mode) & 0o077:
        raise StartError(
            f"--token-file = {path}: others can read it (mode {stat.S_IMODE(mode):o}); run: chmod 600 {path}"
        )
    kind, *keys = content.split() or [b""]
    if kind != _KIND.encode() or len(keys) != 3 or any(len(key) != _KEY for key in keys):
        raise StartError(f"--token-file = {path}: not a token of a run; copy the file that the run names, as it is")
    run, public, secret = keys
    return RunKeys(KeyPair(run, b""), KeyPair(public, secret))
