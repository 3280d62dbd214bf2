"""The lanes of an env batch's slots: what its thread did to each, and what each waited for in between.

Invariant: a lane's spans do not overlap, and those of stepping and resetting, each divided by the slots that shared it,
add up over the lanes to the units of work of the thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polyrhythm.runtime.spans import GENERATOR, THREAD, TICKETS, Span
from polyrhythm.stations.simulator.slot import Slot


class Lanes:
    """Since when each slot waits, and for what: (kind, sequence of its request).

    It says THREAD only where the slot's last unit left it more to do. When a ticket or an answer came while the thread
    was at another slot is known by whoever sent it, so that part of a wait is cut off where the spans come together
    (`pipeline.observers.timeline`). Where a unit is followed by another and nobody asked for its spans, they are lost.
    """

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, tuple[str, int]]] = {}
        self._changed: list[Span] = []
        self._unasked = False

    def note_unit(self) -> None:
        """There was a unit of work; if somebody measures, `close_unit` follows."""
        if self._unasked:
            self._since.clear()
            self._changed.clear()
        self._unasked = True

    def close_unit(self, kind: str, slots: Sequence[Slot], begin: float, end: float) -> Iterator[Span]:
        """A unit of work, or a part of one, for these slots together: how each had waited for it, and that it came."""
        self._unasked = False
        yield from self._changed
        self._changed.clear()
        for slot in slots:
            yield from self._waited(slot.name, begin)
            yield Span(slot.name, kind, begin, end, slots=len(slots))
            self._since[slot.name] = (end, _waits_for(slot))

    def note_change(self, slot: Slot, now: float) -> None:
        """Between two units of work the slot may have come to wait for something else."""
        waits_for = _waits_for(slot)
        if slot.name in self._since and self._since[slot.name][1] != waits_for:
            self._changed += self._waited(slot.name, now)
            self._since[slot.name] = (now, waits_for)

    def _waited(self, slot: str, until: float) -> Iterator[Span]:
        since, (kind, number) = self._since.get(slot, (until, ("", 0)))
        if since < until:
            yield Span(slot, kind, since, until, number)


def _waits_for(slot: Slot) -> tuple[str, int]:
    if slot.asked:
        return GENERATOR, slot.sequence
    return THREAD if slot.live or slot.pending else TICKETS, 0
