"""Whether main's host can be reached: asked now and then, in a thread of its own.

A process on another host that cannot reach it has been given up, or will be; it must not live on for ever, and whoever
started it may not be able to end it. Main's agent answers, so a main that is busy or stopped is not silent.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from polyrhythm.runtime.hosts import questions as q
from polyrhythm.runtime.hosts.client import DataClient, HostSilent

log = logging.getLogger(__name__)

#: Seconds between two questions; and the most that one counts as silence, however long this process was stopped.
_EVERY_S, _MOST_S = 2.0, 6.0


class MainWatch:
    """client: of main's host, for this alone. silent: it has not answered for `silence_s`."""

    def __init__(self, client: DataClient, silence_s: float) -> None:
        self.silent = False
        self._client, self._silence_s = client, silence_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="main-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Consumes: answers of main's host. Waits for: these, and time. Unblocked by: both, or `close`. Produces:
        `silent`."""
        lasted = 0.0
        while not self._over.is_set() and not self.silent:
            begin = time.monotonic()
            try:
                self._client.ask(q.Held())
                lasted = 0.0
            except HostSilent:
                lasted += min(time.monotonic() - begin, _MOST_S)
                log.warning("main's host has not answered for %.0f s", lasted)
            except zmq.ZMQError:
                return  # this process ends
            self.silent = lasted >= self._silence_s
            self._over.wait(_EVERY_S)

    def close(self) -> None:
        """Ask no more; an answer that is waited for still is, or its limit."""
        self._over.set()
        self._thread.join()
        self._client.close()
