"""The present state of slots and generators as a closed loop, which forecasts start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polyrhythm.plugins.autobatch.forecast import ClosedLoop
from polyrhythm.plugins.autobatch.timing import PassTimeModel, RunningPass, SlotTiming
from polyrhythm.scheduler.padding import padded


@dataclass(frozen=True, slots=True)
class ServingGroup:
    """Slots by name, and how many generators serve them in common."""

    slots: dict[str, SlotTiming]
    generators: int


def select_group(slots: Mapping[str, SlotTiming], generators: int, *, shared: bool) -> ServingGroup:
    """The slots and generators that a forecast covers.

    All of them, where any generator serves any slot. Where slots have generators of their own, by the routing (not
    `shared`) or by their sharding, one generator alone: the one that most rows are bound to, with those slots and its
    share (one in `generators`) of the slots that are bound to none.
    """
    unbound = [name for name, slot in slots.items() if not slot.generator]
    if shared and len(unbound) == len(slots):
        return ServingGroup(dict(slots), generators)
    bound_rows: dict[str, int] = {}
    for slot in slots.values():
        if slot.generator:
            bound_rows[slot.generator] = bound_rows.get(slot.generator, 0) + slot.max_rows
    busiest = max(bound_rows, key=bound_rows.__getitem__, default="")
    share = set(unbound[::generators])
    own = {name: slot for name, slot in slots.items() if name in share or (busiest and slot.generator == busiest)}
    return ServingGroup(own, 1)


def snapshot_loop(
    group: ServingGroup,
    running: Iterable[RunningPass],
    pass_time: PassTimeModel,
    buckets: tuple[int, ...],
    now: float,
) -> ClosedLoop:
    """The group's closed loop with `now` as time 0. running: all passes under way; buckets: row counts of padding."""
    index = {name: number for number, name in enumerate(group.slots)}
    loop = ClosedLoop(
        rows=[slot.rows for slot in group.slots.values()],
        absences_s=[slot.list_absences() for slot in group.slots.values()],
        generators=group.generators,
        base_s=pass_time.base_s,
        per_row_s=pass_time.per_row_s,
        buckets=buckets,
    )
    in_pass: set[int] = set()
    of_group = [one for one in running if any(slot in index for slot in one.slots)]
    for one in of_group[: group.generators]:
        batch = tuple(index[slot] for slot in one.slots if slot in index)
        end = one.started + pass_time.predict(padded(one.rows, buckets))
        loop.passes.append((max(0.0, end - now), batch))
        in_pass.update(batch)
    for number, slot in enumerate(group.slots.values()):
        if slot.is_away:
            loop.returns.append((max(0.0, slot.predict_return() - now), number))
        elif number not in in_pass:
            loop.waiting.append((slot.since - now, number))
    loop.waiting.sort()
    return loop
