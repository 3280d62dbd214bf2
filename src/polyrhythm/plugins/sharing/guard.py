"""Starts NVIDIA's MPS control daemon, and ends it when standard input ends, however the run ended that holds it:
`python -m polyrhythm.plugins.sharing.guard PROGRAM FOLDER`. The daemon's folders are in the environment; FOLDER is
removed at the end.

The daemon detaches itself, so that its parent's end is no sign to it. This process adopts it (prctl(2),
PR_SET_CHILD_SUBREAPER), sees its end at once, and starts it again a few times: its stations are replaced as others.
A line to standard output: `started` first, then a sentence for each end.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
#: Starts of one run, seconds between two looks, for the program to answer, and for the daemon to end.
_STARTS, _LOOK_S, _ANSWER_S, _END_S = 4, 0.25, 15.0, 5.0


def descendants() -> dict[int, str]:
    """Process id → command of the children of this process, adopted ones too; zombies are reaped first."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found = {}
    for task in Path("/proc/self/task").iterdir():
        for pid in map(int, (task / "children").read_text().split()):
            with suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
    return found


def is_alive(program: str) -> bool:
    return any(Path(program).name in command for command in descendants().values())


def start(program: str) -> str:
    """Start the daemon; the reason why it did not, in words, or ""."""
    try:
        done = subprocess.run(  # noqa: S603 - the program that was found
            [program, "-d"], stdin=subprocess.DEVNULL, stdout=2, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"status {done.returncode}"
    return "" if is_alive(program) else "it has ended at once"


def stop(program: str) -> None:
    """Tell the daemon to quit; what is left after that, such as its servers, is killed."""
    if is_alive(program):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([program], input=b"quit\n", stdout=2, timeout=_ANSWER_S, check=False)  # noqa: S603
    until = time.monotonic() + _END_S
    while descendants() and time.monotonic() < until:
        time.sleep(_LOOK_S / 5)
    for pid in descendants():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def watch(program: str) -> None:
    """Until standard input ends, see the daemon's end and start it again."""
    starts = 1
    while not select.select([0], [], [], _LOOK_S)[0] or os.read(0, 1):
        if starts > _STARTS or is_alive(program):
            continue
        starts += 1
        stop(program)  # its servers
        if starts > _STARTS:
            _say(f"the control daemon has ended {_STARTS} times; the device is shared by time slices from now on")
        elif why := start(program):
            starts = _STARTS + 1
            _say(f"the control daemon has ended, and its start failed ({why}); the device is shared by time slices")
        else:
            _say("the control daemon has ended and was started again; stations that used it are replaced")


def _say(sentence: str) -> None:
    with suppress(OSError):  # the run is gone, and so is this process soon
        os.write(1, sentence.encode() + b"\n")


def main() -> None:
    program, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        why = start(program)
        _say(why or "started")
        if not why:
            watch(program)
    finally:
        stop(program)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
