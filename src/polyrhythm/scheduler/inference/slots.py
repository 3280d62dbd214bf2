"""What the serving half knows of a slot: its request, who answered it, and which generator it must use.

The other half of a slot's state (rows, tickets, parked episodes) is in `rollout/rows`. The conductor tells this half
when a slot becomes live (one of its rows holds a ticket) or stops being live.

Invariant: `live` counts the live slots that are not reserved for evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyrhythm.scheduler.records import EnvBatchInfo, Request


@dataclass(slots=True)
class ServedSlot:
    """ordinal: number of the slot for `routing: fixed`, -1 for a reserved one; generator: the only one that may serve
    it, if its sharding names one. request: the one that waits or is in a batch; last_request: the last one heard;
    answered_by: the generator that reported its answer, "" before that. host: where its observations lie."""

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


@dataclass(slots=True)
class SlotRegistry:
    """All slots of all present simulators. ordinals: slot → its number, kept while its simulator is away."""

    slots: dict[str, ServedSlot] = field(default_factory=dict)
    live: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)

    def join(self, simulator: str, batches: tuple[EnvBatchInfo, ...], host: str = "") -> None:
        for batch in batches:
            for slot in batch.slots:
                ordinal = -1 if batch.reserved else self.ordinals.setdefault(slot.slot, len(self.ordinals))
                own = ServedSlot(slot.slot, simulator, ordinal, slot.generator, batch.reserved, host=host)
                self.slots[slot.slot] = own

    def leave(self, simulator: str) -> list[str]:
        """Forget the simulator's slots; returns their names."""
        gone = [slot for slot in self.slots.values() if slot.simulator == simulator]
        for slot in gone:
            self.live -= slot.live and not slot.reserved
            del self.slots[slot.name]
        return [slot.name for slot in gone]

    def set_live(self, slot: ServedSlot, *, live: bool) -> None:
        if not slot.reserved:
            self.live += live - slot.live
        slot.live = live
