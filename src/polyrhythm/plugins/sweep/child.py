"""A run's process: `polyrhythm train`, which saves and stops if the sweep's process ends, however that ends (Linux).

    python -m polyrhythm.plugins.sweep.child PARENT FOLDER WORD...

It first waits for the process of a killed sweep that may still save the run in FOLDER.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from pathlib import Path

from polyrhythm.cli.main import main
from polyrhythm.observe.run_folder import LOCK_FILE

_PR_SET_PDEATHSIG = 1
#: Seconds that another process may still hold the run; the alarm then ends this one.
_WAIT_S = 180


def await_lock(folder: Path) -> None:
    """Wait until no process has the run in this folder."""
    if (folder / LOCK_FILE).is_file():
        signal.alarm(_WAIT_S)
        with (folder / LOCK_FILE).open("r", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
        signal.alarm(0)


if __name__ == "__main__":
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
    await_lock(Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
