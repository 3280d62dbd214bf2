"""Atomic writing of files, and messages for file errors."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: What the system says when it has no room: a full disk, a full quota, a limit on the size of files.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: And where it does not let us: no permission, a read-only disk, a folder in a file's place or a file in a folder's.
NOT_ALLOWED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}
)


def trouble(error: OSError) -> str:
    """Sentence on why a file could not be written or read, with its path; "" for other errors."""
    path = error.filename2 or error.filename
    if error.errno in NO_ROOM:
        return f"{path or 'a file'} could not be written ({error.strerror}); make room on that disk"
    if error.errno in NOT_ALLOWED and path:
        return (
            f"{path} cannot be written or read ({error.strerror}); move it away, change its permissions, or use "
            "another folder"
        )
    return ""


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
    unfinished = path.with_name(path.name + ".part")
    try:
        with name_in_errors(path):
            yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy where the file system has no links. OSError: neither works."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
