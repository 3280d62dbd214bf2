"""A run's process: `polyrhythm train`, which saves and stops if the sweep's process ends, however that ends (Linux).

    python -m polyrhythm.plugins.sweep.child PARENT FOLDER WORD...

It first waits for the process of a killed sweep that may still save the run in FOLDER, and removes what a run left
that was killed before it had written its settings.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from polyrhythm.cli.main import main
from polyrhythm.errors import RunFolderError
from polyrhythm.observe.run_folder import CONFIG_FILE, JOB_FOLDER, LOCK_FILE

_PR_SET_PDEATHSIG = 1
#: Seconds that another process may still hold the run.
_WAIT_S = 180.0


def take_run(folder: Path, wait_s: float = _WAIT_S) -> None:
    """Wait until no process has the run in this folder, then remove all but its job's files if it has no settings.

    RunFolderError: a process still has it after `wait_s`. The wait ends by SIGALRM, so this is for the main thread.
    """
    if not (folder / LOCK_FILE).is_file():
        _remove_unbegun(folder)
        return
    with (folder / LOCK_FILE).open("r", encoding="utf-8") as file:

        def refuse(*_: Any) -> None:
            holder = file.read().strip() or "unknown"
            raise RunFolderError(
                f"{folder} is still in use by process {holder} after {wait_s:g} s; wait for it or end it, then give "
                "the same command again"
            )

        before = signal.signal(signal.SIGALRM, refuse)
        signal.setitimer(signal.ITIMER_REAL, wait_s)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        _remove_unbegun(folder)


def _remove_unbegun(folder: Path) -> None:
    if (folder / CONFIG_FILE).is_file():
        return
    for one in folder.iterdir():
        if one.is_dir() and one.name != JOB_FOLDER:
            shutil.rmtree(one)
        elif not one.is_dir():
            one.unlink()


if __name__ == "__main__":
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    try:
        take_run(Path(sys.argv[2]))
    except (RunFolderError, OSError) as error:
        sys.exit(f"polyrhythm: {error}")
    sys.exit(main(sys.argv[3:]))
