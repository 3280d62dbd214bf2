"""What slots wait for: asynchronous steps of the env batch, which are deferred if they would block, and the lanes of
the timeline, with the thread's work for each slot and the slot's waits in between.

Invariant: a lane's spans do not overlap; the stepping and resetting spans of all lanes, each divided by the number of
slots that shared it, add up to the thread's units of work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence

import numpy as np

from polyrhythm.runtime.spans import GENERATOR, THREAD, TICKETS, Span
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv
from polyrhythm.stations.simulator.slot import Slot


class DeferredSteps:
    """Of one env batch; has an effect only with the trait `async_steps`."""

    def __init__(self, env: GuardedEnv) -> None:
        self._env, self._begins = env, env.inner if env.async_steps else None
        self._defers = False
        self._begun: dict[str, int] = {}  # slot → sequence of the request whose step has begun
        self._unseen: dict[str, Slot] = {}  # queued since the last `begin`
        self._deferred: dict[str, tuple[Slot, float]] = {}  # slots whose step would block, and since when
        self._last_requeued = ""  # the last slot of `requeued`

    def defer(self) -> int | None:
        """From now on defer steps that would block. Returns a descriptor that becomes readable when one may be ready,
        or None if no step ever blocks."""
        self._defers = self._begins is not None
        return self._begins.fileno() if self._begins is not None else None

    @property
    def since(self) -> float | None:
        """Start of the longest deferral."""
        return min((since for _, since in list(self._deferred.values())), default=None)

    def add_queued(self, slot: Slot) -> None:
        """The slot was queued, so it may have been answered."""
        if self._begins is not None:
            self._unseen[slot.name] = slot

    def begin(self, on_fault: Callable[[Slot, EnvFault], None]) -> None:
        """Begin the steps of the slots answered since the last call. on_fault: called for each that fails."""
        if self._defers and self._begins is not None:
            self._begins.waits(())  # else a finished step that no slot awaits leaves the descriptor readable
        unseen, self._unseen = self._unseen, {}
        for slot in unseen.values():
            if slot.answered and slot.due_rows and self._begun.get(slot.name) != slot.sequence:
                self._begun[slot.name] = slot.sequence
                try:
                    self._env.begin_step(*slot.due())
                except EnvFault as fault:
                    self._env.drop_step(sorted(self.begun_rows(slot)))
                    on_fault(slot, fault)

    def begun_rows(self, slot: Slot) -> set[int]:
        """The slot's rows whose step has begun and is not done."""
        begun = slot.answered and self._begun.get(slot.name) == slot.sequence
        return set(map(int, slot.due()[0])) if begun else set()

    def must_wait(self, slot: Slot, members: Sequence[Slot]) -> bool:
        """Whether the step of `members` is deferred; the deferral is recorded for `slot`."""
        if not self._defers or self._begins is None:
            return False
        if self._begins.waits(np.concatenate([member.due()[0] for member in members])):
            self._deferred.setdefault(slot.name, (slot, time.monotonic()))
            return True
        for member in members:
            self._deferred.pop(member.name, None)
        return False

    def are_queued(self, queued: Container[str]) -> bool:
        """Whether slots from `requeued` are still queued. queued: names of slots."""
        return self._last_requeued in queued

    def requeued(self) -> Iterator[Slot]:
        for slot, _ in list(self._deferred.values()):
            self._last_requeued = slot.name
            if not slot.answered or not slot.due_rows:  # its rows were cancelled
                del self._deferred[slot.name]
            yield slot


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
