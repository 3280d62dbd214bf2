"""The samples of a trainer's updates that lie on other hosts, until it has fetched them.

They are fetched in the trainer's work, all of an update together, so that supervision limits how long that takes and
several are on their way at a time.
"""

from __future__ import annotations

from collections import deque

from polyrhythm.runtime.memory.arena import Arena
from polyrhythm.runtime.messages import Unobeyable
from polyrhythm.scheduler.records import StartUpdate

#: Tickets that an error names.
_NAMED = 8


class FarSamples:
    """False if there is nothing to fetch."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._todo: deque[StartUpdate] = deque()

    def __bool__(self) -> bool:
        return bool(self._todo)

    def could_have(self, update: StartUpdate) -> bool:
        """Whether each sample lies here, or on another host."""
        places = zip(update.payload_ids, update.tickets, strict=True)
        return all(self._arena.lies_elsewhere(p) or self._arena.has(p, ticket) for p, ticket in places)

    def note(self, update: StartUpdate) -> None:
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
