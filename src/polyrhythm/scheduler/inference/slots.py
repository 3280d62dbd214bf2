"""The serving half's state of a slot: its request, the generator that answered it, and its bound generator.

The rest of a slot's state (rows, tickets, parked episodes) is in `rollout/rows`. The conductor reports when a slot
becomes live (one of its rows holds a ticket) or stops being live.

Invariants: `live` counts the live slots that are not reserved for evaluation; `absent` counts those of them without a
queued request, by the pool in which it is expected.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.records import EnvBatchInfo, Request


@dataclass(slots=True)
class ServedSlot:
    """ordinal: number of the slot for `routing: fixed`, -1 for a reserved one; generator: the only one that may serve
    it, if its sharding names one.

    request: waiting or in a batch; last_request: the last one received; answered_by: the generator that reported its
    answer, "" before that. host: of its observations. expected: the pool in which it counts as absent; None while it
    waits, is not live or is reserved.
    """

    name: str
    simulator: str
    ordinal: int
    generator: str | None
    reserved: bool = False
    live: bool = False
    request: Request | None = None
    last_request: Request | None = None
    answered_by: str = ""
    host: str = ""
    expected: str | None = field(default=None, init=False, metadata=UNSAVED)


@dataclass(slots=True)
class SlotRegistry:
    """Slots of all present simulators. ordinals: slot → its number, kept while its simulator is absent.

    absent: positive counts by pool, kept by `BatchScheduler`; expected_among: the live generators for which they were
    counted, None if they must be recounted, as after a restore.
    """

    slots: dict[str, ServedSlot] = field(default_factory=dict)
    live: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict, init=False, metadata=UNSAVED)
    expected_among: list[str] | None = field(default=None, init=False, metadata=UNSAVED)

    def join(self, simulator: str, batches: tuple[EnvBatchInfo, ...], host: str = "") -> None:
        for batch in batches:
            for slot in batch.slots:
                ordinal = -1 if batch.reserved else self.ordinals.setdefault(slot.slot, len(self.ordinals))
                own = ServedSlot(slot.slot, simulator, ordinal, slot.generator, batch.reserved, host=host)
                self.slots[slot.slot] = own

    def leave(self, simulator: str) -> list[str]:
        """Remove the simulator's slots; returns their names."""
        gone = [slot for slot in self.slots.values() if slot.simulator == simulator]
        for slot in gone:
            self.live -= slot.live and not slot.reserved
            self.expect(slot, None)
            del self.slots[slot.name]
        return [slot.name for slot in gone]

    def set_live(self, slot: ServedSlot, *, live: bool) -> None:
        if not slot.reserved:
            self.live += live - slot.live
        slot.live = live

    def expect(self, slot: ServedSlot, pool: str | None) -> None:
        """The slot's next request is expected in `pool`; None: it is not expected."""
        before, slot.expected = slot.expected, pool
        if before == pool:
            return
        if before is not None:
            self.absent[before] -= 1
            if not self.absent[before]:
                del self.absent[before]
        if pool is not None:
            self.absent[pool] = self.absent.get(pool, 0) + 1
