"""What a trainer does beside its steps: it fetches samples that lie on other hosts, and publishes weights.

Samples are fetched in the trainer's work, all of an update together, so that supervision limits how long that takes and
several are on their way at a time. A publication is done at once or in a thread, beside the update that follows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Unobeyable
from polyrhythm.scheduler.records import StartUpdate

#: Tickets that an error names.
_NAMED = 8


class FarSamples:
    """The samples of updates that lie on other hosts, until they are fetched. False if there is nothing to fetch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._todo: deque[StartUpdate] = deque()

    def __bool__(self) -> bool:
        return bool(self._todo)

    def could_have(self, update: StartUpdate) -> bool:
        """Whether each sample lies here, or on another host."""
        places = zip(update.payload_ids, update.tickets, strict=True)
        return all(self._arena.lies_elsewhere(p) or self._arena.has(p, ticket) for p, ticket in places)

    def add(self, update: StartUpdate) -> None:
        """The trainer is to train on this."""
        if any(map(self._arena.lies_elsewhere, update.payload_ids)):
            self._todo.append(update)

    def fetch_next(self) -> None:
        """Have the samples of the next update here. Unobeyable: one is not there, or its host does not answer."""
        update, why = self._todo.popleft(), ""
        try:
            self._arena.fetch(update.payload_ids)
        except LookupError as error:
            why = str(error)
        places = zip(update.payload_ids, update.tickets, strict=True)
        lacking = [ticket for payload_id, ticket in places if not self._arena.has(payload_id, ticket)]
        if why or lacking:
            self._todo.clear()
            raise Unobeyable(update, why or f"the samples of tickets {lacking[:_NAMED]} are not there any more")


class PublicationJob:
    """One publication, done at once or in a thread. begun: when; lasted: its begin and end, once it is over. read: the
    learner's tensors are not read any more; saved: the state that is due with it is announced, or it is over; set by
    `publish`, which may leave that to the end."""

    def __init__(self, publish: Callable[[PublicationJob], None], version: int, overlap: bool) -> None:
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
