"""The batching rule, worked out anew from all slots and all waiting requests after every event."""

from __future__ import annotations

from collections import Counter

from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.inference.batches import BatchScheduler
from polyrhythm.scheduler.inference.serving import ServedSlot


def idle_but_due(conductor: AnyConductor, now: float) -> str:
    """An idle generator for which a batch is due, or one whose batch becomes due before the conductor wakes; "" for
    none."""
    serving, settings = conductor.serving, conductor.settings
    if not isinstance(serving, BatchScheduler) or settings.batching == "lockstep":
        return ""
    pools = {slot: pool for slot, (pool, _) in serving.queue.orders.items()}
    expected = Counter(
        _next_pool(conductor, slot)
        for slot in serving.slots.slots.values()
        if slot.live and not slot.reserved and slot.name not in pools
    )
    if expected != Counter(serving.slots.absent):
        return f"slots are expected in {expected}, and counted in {serving.slots.absent}"
    wake = float("inf")
    for name in serving.generators.idle:
        own = [serving.slots.slots[slot].request for slot, pool in pools.items() if pool in ("", name)]
        waiting = [request for request in own if request is not None]
        if not waiting:
            continue
        full = sum(request.rows for request in waiting) >= serving.limits.max_rows
        full = full or len(waiting) >= serving.limits.max_requests
        alone = settings.fire_when_all_wait and not expected[""] and not expected[name]
        due = min(request.arrived for request in waiting) + serving.limits.max_wait_s
        if full or alone or now >= due:
            return f"{name} idles although {waiting} are due"
        wake = min(wake, due)
    if conductor.deadline() > wake:
        return f"the conductor sleeps until {conductor.deadline()} although a batch is due at {wake}"
    return ""


def _next_pool(conductor: AnyConductor, slot: ServedSlot) -> str:
    """The only generator that may get the slot's next request, "" if there are several."""
    serving = conductor.serving
    live = [name for name, generator in serving.generators.present.items() if generator.live]
    if slot.generator in live:
        return str(slot.generator)
    if conductor.settings.routing == "fixed" and live:
        return live[slot.ordinal % len(live)]
    bound = serving.router.bindings.get(slot.name, ("", 0))[0]
    return bound if conductor.settings.routing == "affinity" and bound in live else ""
