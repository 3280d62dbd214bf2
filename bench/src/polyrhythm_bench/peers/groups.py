"""Ends process groups as a whole. Standard library and psutil only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_TRACKER = "multiprocessing.resource_tracker"
_POLL_S = 0.05


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can reap them (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end(group: int, patience_s: float = 10.0) -> None:
    """Kill the members of a group except this process, and reap its children among them.

    Python's resource trackers end last and by themselves: they remove the semaphores and shared memory of the others
    first. After `patience_s` they are killed too.
    """
    deadline = time.monotonic() + patience_s
    while living := _members(group):
        others = [process for process in living if not tracks_resources(process)]
        for process in living if time.monotonic() > deadline else others:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        _reap(group)
        time.sleep(_POLL_S)
    _reap(group)


def _members(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and process.pid != os.getpid() and os.getpgid(process.pid) == group:
                found.append(process)
    return found


def tracks_resources(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return any(_TRACKER in word for word in process.cmdline())
    return False


def _reap(group: int) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass


def end_with_owner() -> None:
    """Wait until the owner's end closes standard input; then kill the process group, including this process."""
    while os.read(0, 64):
        pass
    end(os.getpgrp())
    os.kill(os.getpid(), signal.SIGKILL)
