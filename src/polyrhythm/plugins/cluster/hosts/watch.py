"""Whether a host can be reached: its agent is asked again and again, in a thread of its own.

Main asks the agents of all other hosts, and gives up one that is silent. The processes and agents of other hosts ask
main's: one that cannot reach it has been given up, or will be; it must not live on for ever, and whoever started it may
not be able to end it. Agents answer and not main, so a main that is busy or stopped is not silent.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq

from polyrhythm.plugins.cluster.hosts.client import DataClient
from polyrhythm.runtime import questions as q

log = logging.getLogger(__name__)

#: Seconds between an answer and the next question, and between a question without an answer and the next.
_EVERY_S, _AGAIN_S = 2.0, 0.1
#: The most that one question counts as silence, however long this process was stopped.
_MOST_S = q.ANSWER_S + _EVERY_S + 1.0
#: Questions in a row without an answer that make a host silent: one may have been lost with its connection.
_MISSES = 2


class HostWatch:
    """client: of the host, for this alone. answered: when the last question was asked that it has answered."""

    def __init__(self, client: DataClient) -> None:
        self.answered = float("-inf")
        self._client, self._misses, self._silent_s = client, 0, 0.0
        self._over, self._ask_now = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{client.host}", daemon=True)
        self._thread.start()

    def is_silent_for(self, seconds: float) -> bool:
        """Whether it has answered none of several questions for so long."""
        return self._misses >= _MISSES and self._silent_s >= seconds

    def ask(self) -> None:
        """Ask at once, once more if a question is under way."""
        self._ask_now.set()

    def _run(self) -> None:
        """Consumes: answers of the host. Waits for: these, and time. Unblocked by: both, `ask` or `stop`. Produces:
        `answered`, and how long it has been silent."""
        before = time.monotonic()
        while True:
            self._ask_now.clear()
            if self._over:
                return
            begin = time.monotonic()
            try:
                self._client.ask(q.Held())
                self.answered, self._misses, self._silent_s = begin, 0, 0.0
            except LookupError:  # HostSilent, or an answer that is none
                self._silent_s += min(time.monotonic() - before, _MOST_S)
                self._misses += 1
                log.warning("host %s has not answered for %.0f s", self._client.host, self._silent_s)
            except zmq.ZMQError:
                return  # this process ends
            before = time.monotonic()
            self._ask_now.wait(_AGAIN_S if self._misses else _EVERY_S)

    def stop(self) -> None:
        """Ask no more; an answer that is waited for still is, or its limit."""
        self._over = True
        self._ask_now.set()

    def close(self) -> None:
        """Ask no more, and end the connection."""
        self.stop()
        self._thread.join()
        self._client.close()
