"""Atomic writing of files, checked reading of foreign names and JSON, and messages for file errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyrhythm.errors import ConfigError

#: Error numbers for lack of room: a full disk, a full quota, a limit on the size of files.
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
#: Error numbers for too many open files and sockets, of the process or the system.
NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
#: Error numbers for refused access: no permission, a read-only disk, a folder in a file's place or a file in a
#: folder's.
NOT_ALLOWED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}
)

#: Suffixes of unfinished files, and of folders that are being removed.
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
    """Plain data of a JSON text. ValueError: it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add `path` to an OSError of this block that names no file, such as one of a write."""
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


def write_json(path: Path, content: object) -> None:
    """Write indented JSON, atomically. OSError: cannot write."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def inner_path(folder: Path, name: object, *, folders: bool = False) -> Path:
    """Path in `folder` of a file named by another file, such as a downloaded index.

    folders: whether the name may contain folders. ValueError: it may lead out of the folder (absolute, `..`, a
    backslash), is not a name, or has unprintable characters.
    """
    parts = name.split("/") if isinstance(name, str) else [""]
    if not all(part.isprintable() and part.strip(" .") and "\\" not in part for part in parts):
        raise ValueError(f"{name!r} is not the name of a file inside {folder}")
    if len(parts) > 1 and not folders:
        raise ValueError(f"{name!r} is not a plain file name, without folders")
    return folder.joinpath(*parts)


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source`, or a copy if the file system has no links; for a folder, of all its files.

    OSError: neither works.
    """
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
    """Remove a file, or a folder with all its files, if it exists. A folder is renamed first, so that no partial one is
    found."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(path.name + REMOVED)
    shutil.rmtree(removed, ignore_errors=True)
    path.replace(removed)
    shutil.rmtree(removed)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield the folder `<out>.part`, which becomes `out` when the block succeeds. ConfigError: `out` has files."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"out = {out}: it exists; name a new folder, nothing is overwritten")
    unfinished = out.with_name(out.name + UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if out.is_dir():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
