"""The run's folder in shared memory, with its segments and sockets; removal of the folders of dead runs.

    /dev/shm/polyrhythm-<user>-<run id>/     owner (locked while the main process lives), arena, weights, sockets

The kernel releases the lock when its holder ends, however it ends. So a process that gets the lock knows that the run
is over, or, while the file holds no process id yet, that the run is about to lock it.
Where there is no /dev/shm a run refuses to start. POLYRHYTHM_SHARED_MEMORY names another folder; one on a disk works,
but everything that stations exchange is then written to that disk.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from polyrhythm.errors import StartError

log = logging.getLogger(__name__)

_SHARED = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory is meant
_VARIABLE = "POLYRHYTHM_SHARED_MEMORY"
_LOCK = "owner"
#: Seconds after which a folder that was never locked is a dead run's.
_YOUNG_S = 60.0


def shared_root(
    sizes: Mapping[str, int] | None = None, shared: Path = _SHARED, environment: Mapping[str, str] = os.environ
) -> Path:
    """The folder where runs keep their shared memory. StartError: there is none. sizes: for the error text."""
    chosen = environment.get(_VARIABLE)
    root = Path(chosen) if chosen else shared
    if root.is_dir() and os.access(root, os.W_OK):
        return root
    wanted = f", {_megabytes(sum(sizes.values()))} are wanted there" if sizes else ""
    name = f"{_VARIABLE} = {root}" if chosen else f"shared memory: {root}"
    fix = f"mount it (docker: --shm-size), set launcher=inline, or name another folder by {_VARIABLE} (a disk is slow)"
    if chosen:
        fix = f"name a folder that can be written to, or unset {_VARIABLE}"
    raise StartError(f"{name} is {'not writable' if root.is_dir() else 'no folder'}{wanted}; {fix}")


class SharedRunFolder:
    """The folder of one run, with segments of the given sizes in bytes, reserved and zero.

    Raises StartError if there is too little memory, or the folder cannot be made; then nothing is left.
    """

    def __init__(self, sizes: Mapping[str, int], root: Path | None = None) -> None:
        root = root or shared_root(sizes)
        remove_orphans(root)
        refuse_shortage(sizes, root)
        self.folder = root / f"{_prefix()}{secrets.token_hex(4)}"
        self._lock = -1
        try:
            self.folder.mkdir(mode=0o700)
            self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, b"%d" % os.getpid())
            for name, size in sizes.items():
                _reserve(self.folder / name, size)
        except OSError as error:
            self.remove()
            raise StartError(
                f"shared memory: the folder {self.folder} cannot be filled ({error.strerror}); make room in {root}, "
                "or give it to this user"
            ) from error

    def add(self, name: str, size: int) -> None:
        """Another segment of `size` bytes. StartError: there is too little memory."""
        refuse_shortage({name: size}, self.folder.parent)
        _reserve(self.folder / name, size)

    def segment(self, name: str) -> mmap.mmap:
        return open_segment(self.folder, name)

    def remove(self) -> None:
        """Remove the folder. A process that has mapped a segment keeps it until the process ends."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def open_segment(folder: Path, name: str) -> mmap.mmap:
    """Map a segment; all processes that open it share the memory."""
    with (folder / name).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def remove_orphans(root: Path | None = None) -> list[Path]:
    """Remove this user's folders of runs that are over; returns these. StartError: there is no shared memory."""
    removed = []
    for folder in sorted((root or shared_root()).glob(f"{_prefix()}*")):
        if _is_orphan(folder):
            shutil.rmtree(folder, ignore_errors=True)
            log.info("removed %s, left by a run that had ended", folder)
            removed.append(folder)
    return removed


def _prefix() -> str:
    return f"polyrhythm-{os.getuid()}-"


def _is_orphan(folder: Path) -> bool:
    """Whether its run is over: no process holds the lock. False for a folder that we cannot open: it is not ours."""
    try:
        if not (folder / _LOCK).exists():
            return _is_old(folder)
        lock = os.open(folder / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(lock).st_size > 0 or _is_old(folder)
        finally:
            os.close(lock)
    except OSError:
        return False


def _is_old(folder: Path) -> bool:
    return folder.is_dir() and time.time() - folder.stat().st_mtime > _YOUNG_S


def refuse_shortage(sizes: Mapping[str, int], root: Path | None = None) -> None:
    """Raise StartError unless there is room for segments of these sizes (bytes by name)."""
    root = root or shared_root(sizes)
    wanted, free = sum(sizes.values()), shutil.disk_usage(root).free
    if wanted > free:
        parts = ", ".join(f"{name} {_megabytes(size)}" for name, size in sizes.items())
        raise StartError(
            f"shared memory: {_megabytes(wanted)} wanted ({parts}), {_megabytes(free)} free in {root}; lower "
            "rollout.rows, training.mini_batch_samples or freshness.max_lag, or enlarge it (docker: --shm-size)"
        )


def _reserve(path: Path, size: int) -> None:
    """A file of `size` zero bytes whose memory is reserved, so that no later write can fail."""
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
