"""Atomic writing of files, JSON of others, and messages for file errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What the system says when it has no room: a full disk, a full quota, a limit on the size of files.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: What it says where a process, or all of them together, may open no more files and sockets.
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
#: And where it does not let us: no permission, a read-only disk, a folder in a file's place or a file in a folder's.
NOT_ALLOWED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}
)

#: Ends of the names of what is being written, and of folders that are being removed.
UNFINISHED, REMOVED = ".part", ".removed"


def trouble(error: OSError) -> str:
    """Sentence on why a file could not be written or read, with its path; "" for other errors."""
    path = error.filename2 or error.filename
    if error.errno in NO_ROOM:
        return f"{path or 'a file'} could not be written ({error.strerror}); make room on that disk"
    if error.errno in NO_DESCRIPTORS:
        return (
            f"no more files can be opened ({error.strerror}): an environment or connections hold too many; have them "
            "closed, or allow more (ulimit -n)"
        )
    if error.errno in NOT_ALLOWED and path:
        return (
            f"{path} cannot be written or read ({error.strerror}); move it away, change its permissions, or use "
            "another folder"
        )
    return ""


def parse_json(text: str | bytes) -> Any:
    """Plain data of a JSON text. ValueError: it is not one, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """An OSError of this block that names no file, as that of a write does not, names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path, `<path>.part`, which replaces `path` when the block succeeds.

    If the block raises, the temporary file is deleted; if the process is killed, `path` is unchanged.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        with name_in_errors(path):
            yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no links; of a folder, of all its
    files. OSError: neither works."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=lambda a, b: link_or_copy(Path(a), Path(b)))
        return
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file, or a folder with all its files; `target` is whole or absent. OSError: it cannot be written."""
    unfinished = target.with_name(target.name + UNFINISHED)
    remove_whole(unfinished)
    (shutil.copytree if source.is_dir() else shutil.copyfile)(source, unfinished)
    unfinished.replace(target)


def remove_whole(path: Path) -> None:
    """Remove a file, or a folder with all its files, that may be absent; a folder loses its name first, so that nobody
    finds a part of it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(path.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    path.replace(removed)
    shutil.rmtree(removed)
