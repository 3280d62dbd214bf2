"""A publication of the trainer, at once or beside the update that follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Publication:
    """One publication, done at once or in a thread. begun: when; lasted: its begin and end, once it is over. read: the
    learner's tensors are not read any more; saved: the state that is due with it is announced, or it is over; set by
    `publish`, which may leave that to the end."""

    def __init__(self, publish: Callable[[Publication], None], version: int, overlap: bool) -> None:
        self._publish, self.version = publish, version
        self.begun, self.lasted = time.monotonic(), (0.0, 0.0)
        self.read, self.saved = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="publication", daemon=True) if overlap else None
        if self._thread is None:
            self._publish_timed()
        else:
            self._thread.start()

    def _publish_timed(self) -> None:
        self._publish(self)
        self.lasted = (self.begun, time.monotonic())

    def _run(self) -> None:
        try:
            self._publish_timed()
        except Exception as error:  # noqa: BLE001 - raised by wait()
            self._error = error
        finally:
            self.read.set()
            self.saved.set()

    @property
    def over(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait_for(self, stage: threading.Event) -> None:
        """Wait until it has come so far; raise its error, if any."""
        if self._thread is not None:
            stage.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until it is over; raise its error, if any."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
