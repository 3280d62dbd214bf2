"""Starts NVIDIA's MPS control daemon, and ends it when standard input ends, however the run ended that holds it:
`python -m polyrhythm.plugins.sharing.guard PROGRAM FOLDER QUIT_S`. The daemon's folders are in the environment; FOLDER
is removed at the end. QUIT_S: seconds for the daemon to be told to quit. Status 1: something of it is left.

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
#: Children of this process's main thread, where the kernel lists them (CONFIG_PROC_CHILDREN).
CHILDREN = "/proc/thread-self/children"
#: Seconds for the program to start the daemon, and to have it quit.
START_S, QUIT_S = 15.0, 15.0
#: Starts of one run, seconds between two looks, and for what is killed to be gone.
_STARTS, _LOOK_S, _KILL_S = 4, 0.25, 5.0


def longest_end_s(quit_s: float) -> float:
    """Seconds within which this process ends once its standard input has: a start again may be under way."""
    return START_S + 2 * (quit_s + _KILL_S)


def children() -> dict[int, str]:
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
    return any(Path(program).name in command for command in children().values())


def start(program: str) -> str:
    """Start the daemon; the reason why it did not, in words, or ""."""
    try:
        done = subprocess.run(  # noqa: S603 - the program that was found
            [program, "-d"], stdin=subprocess.DEVNULL, stdout=2, timeout=START_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return f"status {done.returncode}"
    return "" if is_alive(program) else "it has ended at once"


def stop(program: str, quit_s: float) -> bool:
    """Tell the daemon to quit; what is left after that, such as its servers, is killed. Whether nothing is left."""
    if is_alive(program):
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([program], input=b"quit\n", stdout=2, timeout=quit_s, check=False)  # noqa: S603
    until = time.monotonic() + quit_s / 3
    while children() and time.monotonic() < until:
        time.sleep(_LOOK_S / 5)
    until = time.monotonic() + _KILL_S
    while left := children():  # servers become children once their daemon is killed
        if time.monotonic() >= until:
            return False
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S / 5)
    return True


def watch(program: str, quit_s: float) -> None:
    """Until standard input ends, see the daemon's end and start it again."""
    starts = 1
    while not select.select([0], [], [], _LOOK_S)[0] or os.read(0, 1):
        if starts > _STARTS or is_alive(program):
            continue
        starts += 1
        stop(program, quit_s)  # its servers
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
    program, folder, quit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        why = start(program)
        _say(why or "started")
        if not why:
            watch(program, quit_s)
    finally:
        ended = stop(program, quit_s)
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if ended else 1)


if __name__ == "__main__":
    main()
