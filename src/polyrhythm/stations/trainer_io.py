"""The trainer's work beside its steps: fetching samples from other hosts, and publishing weights.

All samples of an update are fetched together within the trainer's work, so that supervision limits the time and several
transfers overlap. A publication runs at once or in a thread, beside the update that follows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Unobeyable
from polyrhythm.scheduler.records import StartUpdate

#: Tickets that an error names.
_NAMED = 8


class FarSamples:
    """Updates whose samples on other hosts are still to be fetched; falsy if there are none."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._todo: deque[StartUpdate] = deque()

    def __bool__(self) -> bool:
        return bool(self._todo)

    def could_have(self, update: StartUpdate) -> bool:
        """Whether each sample is in the arena or on another host."""
        places = zip(update.payload_ids, update.tickets, strict=True)
        return all(self._arena.lies_elsewhere(p) or self._arena.has(p, ticket) for p, ticket in places)

    def add(self, update: StartUpdate) -> None:
        """Queue the update if some of its samples are on other hosts."""
        if any(map(self._arena.lies_elsewhere, update.payload_ids)):
            self._todo.append(update)

    def fetch_next(self) -> None:
        """Fetch the samples of the next update. Unobeyable: one is missing, or its host does not answer."""
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
    """One publication, run at once or in a thread. begun: its start; lasted: (start, end), once it is over.

    Events that `publish` sets, or the end of the job: read: the learner's tensors are no longer read; saved: the state
    that is due with it is announced.
    """

    def __init__(self, publish: Callable[[PublicationJob], None], version: int, overlap: bool) -> None:
        self._publish, self.version = publish, version
        self.begun, self.lasted = time.monotonic(), (0.0, 0.0)
        self.read, self.saved = threading.Event(), threading.Event()
        self._result = Future[None]()
        if overlap:
            threading.Thread(target=self._run, name="publication", daemon=True).start()
        else:
            self._run()
            self.wait()

    def _run(self) -> None:
        try:
            self._publish(self)
            self.lasted = (self.begun, time.monotonic())
            self._result.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised by wait()
            self._result.set_exception(error)
        finally:
            self.read.set()
            self.saved.set()

    @property
    def over(self) -> bool:
        return self._result.done()

    def wait_for(self, stage: threading.Event) -> None:
        """Wait until the event is set; raises the job's error."""
        stage.wait()
        if self.over:
            self.wait()

    def wait(self) -> None:
        """Wait until the job is over; raises its error."""
        self._result.result()
