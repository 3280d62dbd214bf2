"""A call that can pause and resume, for workers that take turns in one process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from polyrhythm.runtime.messages import StopWork

log = logging.getLogger(__name__)

#: Seconds within which a call that is ended has to leave.
_LEAVE_S = 5.0


class Turn:
    """Runs `body` in a thread that executes only during `resume`, so that only one thread works at a time. Invariant:
    the body and the caller of `resume` never run simultaneously."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self._body, self._over, self._ended = body, False, False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self) -> bool:
        """Run the body until it pauses or ends; True if it has ended."""
        self._go.release()
        self._back.acquire()
        return self._over

    def pause(self) -> None:
        """Called by the body: wait for `resume`. StopWork: the body must end."""
        self._back.release()
        self._go.acquire()
        if self._ended:
            raise StopWork

    def end(self) -> None:
        """Make the paused body raise StopWork, and wait until it ends."""
        self._ended = True
        self._go.release()
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            log.warning("%s does not leave; its thread ends with this process", self._thread.name)

    def _run(self) -> None:
        """Consumes: turns. Waits for: one. Unblocked by: `resume` or `end`. Produces: the effects of the body."""
        self._go.acquire()
        try:
            if not self._ended:
                self._body()
        except StopWork:
            pass
        finally:
            self._over = True
            self._back.release()
