"""One incarnation of a station as this machine's process: started, heard, told, ended and reaped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from polyrhythm.errors import RunHalted
from polyrhythm.runtime.processes.child import ChildSpec
from polyrhythm.runtime.processes.supervision import LivenessMonitor
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.sockets import Outbox, Sockets
from polyrhythm.scheduler import records

#: How much of a station's log is shown when it ends badly.
_LAST_LINES, _LAST_BYTES = 12, 16_384
_REAP_S = 10.0
#: Signals that come from somebody else: a person, the kernel for want of memory, a machine that shuts down.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class ChildProcess:
    """A started process. joined, endpoints: its announcement and its parts' inboxes, once it stands ready; ended: here,
    by `end`; killed: by somebody else, before that."""

    def __init__(self, posting: ChildSpec, log_file: Path, now: float) -> None:
        self.station, self.incarnation = posting.station, posting.incarnation
        self.vigil = LivenessMonitor(began=now)
        self.endpoints: Mapping[str, str] = {}
        self.joined: records.Event | None = None
        self.heartbeat: wire.Heartbeat | None = None
        self.last_words: wire.Failed | None = None
        self.ended = self.killed = False
        self._parts: list[Outbox] = []
        self._log_file = log_file
        with log_file.open("ab") as log:  # a resumed run writes on
            self._popen = _start(posting, log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exited(self) -> bool:
        return self._popen.poll() is not None

    @property
    def reachable(self) -> bool:
        """It stands ready, and has not been ended here."""
        return bool(self._parts)

    def greet(self, sockets: Sockets, inboxes: Mapping[str, str], joined: records.Event) -> None:
        """It stands ready: open lines to its parts."""
        self.endpoints, self.joined = inboxes, joined
        self._parts = [sockets.outbox(endpoint) for endpoint in inboxes.values()]
        self.vigil.present = True

    def tell(self, message: wire.Message, part: int = 0) -> None:
        """Send to one of its parts, in their order."""
        self._parts[part].send(wire.encode(message))

    def tell_all(self, message: wire.Message) -> None:
        for part in range(len(self._parts)):
            self.tell(message, part)

    def how_it_ended(self) -> str:
        """The exit in words; "" while it runs."""
        status = self._popen.poll()
        if status is None:
            return ""
        if self.last_words is not None:
            return self.last_words.error
        if status < 0:
            known = {number.value: number.name for number in signal.Signals}
            return f"was ended by {known.get(-status, f'signal {-status}')}"
        return f"ended with status {status}"

    def last_lines(self) -> str:
        """The end of its log."""
        with self._log_file.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            text = file.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def wait(self, seconds: float) -> bool:
        """Until it has ended; False if it has not in time."""
        try:
            self._popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill it and reap it; afterwards it writes nowhere. RunHalted: the kernel does not let it go."""
        self.ended = True
        for outbox in self._parts:
            outbox.close()
        self._parts = []
        status = self._popen.poll()
        if status is not None:
            self.killed = -status in _FROM_OUTSIDE
        else:
            self._popen.kill()
            if not self.wait(_REAP_S):
                raise RunHalted(
                    f"{self.station}: its process {self.pid} does not end {_REAP_S:g} s after SIGKILL, so its memory "
                    "cannot be given to another; look at its device or file system, then start again with resume"
                )


def _start(posting: ChildSpec, log: IO[bytes]) -> subprocess.Popen[bytes]:
    threads = str(posting.seat.threads)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
    }
    environment |= posting.seat.environment
    command = [sys.executable, "-m", "polyrhythm.runtime.processes.child", posting.station]  # the name is for `ps`
    # A session of its own: what a terminal sends to main's group is main's affair from the first moment.
    popen = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    assert popen.stdin is not None
    try:
        popen.stdin.write(msgspec.msgpack.encode(posting))
        popen.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already, which is noticed where processes are watched
    return popen
