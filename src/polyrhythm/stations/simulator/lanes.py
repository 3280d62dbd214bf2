"""Timeline lanes of an env batch's slots: its thread's work for each slot, and the slot's waits in between.

Invariant: a lane's spans do not overlap; the stepping and resetting spans of all lanes, each divided by the number of
slots that shared it, add up to the thread's units of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyrhythm.runtime.spans import GENERATOR, THREAD, TICKETS, Span
from polyrhythm.stations.simulator.slot import Slot


class Lanes:
    """Start and cause of each slot's wait: (kind, sequence of its request).

    A wait is THREAD only if the slot's last unit left it more to do. If a ticket or an answer arrives while the thread
    works for another slot, only the sender knows when; an observer splits the wait there. Spans that
    are not read before the next unit are lost.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, tuple[str, int]]] = {}
        self._changed: list[Span] = []
        self._unasked = False

    def begin_unit(self) -> None:
        """Begin a unit of work; `close_unit` follows if spans are recorded."""
        if self._unasked:
            self._since.clear()
            self._changed.clear()
        self._unasked = True

    def close_unit(self, kind: str, slots: Sequence[Slot], begin: float, end: float) -> Iterator[Span]:
        """Spans of a unit of work, or a part of one, for these slots: each slot's wait, then the work."""
        self._unasked = False
        yield from self._changed
        self._changed.clear()
        for slot in slots:
            yield from self._waited(slot.name, begin)
            yield Span(slot.name, kind, begin, end, slots=len(slots))
            self._since[slot.name] = (end, _waits_for(slot))

    def mark_change(self, slot: Slot, now: float) -> None:
        """The slot may wait for something else from `now` on, between two units."""
        waits_for = _waits_for(slot)
        if slot.name in self._since and self._since[slot.name][1] != waits_for:
            self._changed += self._waited(slot.name, now)
            self._since[slot.name] = (now, waits_for)

    def _waited(self, slot: str, until: float) -> Iterator[Span]:
        since, (kind, number) = self._since.get(slot, (until, ("", 0)))
        if since < until:
            yield Span(slot, kind, since, until, number)


def _waits_for(slot: Slot) -> tuple[str, int]:
    if slot.has_request:
        return GENERATOR, slot.sequence
    return THREAD if slot.live or slot.pending else TICKETS, 0
