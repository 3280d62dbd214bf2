"""How things stand, as the closed loop that forecasts begin from: who is away, who waits, what is in a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polyrhythm.scheduler.autobatch.forecast import PASS, ClosedLoop
from polyrhythm.scheduler.autobatch.timing import ServiceTime, SlotPace
from polyrhythm.scheduler.padding import padded

#: A pass under way: when it began, its rows, its slots.
UnderWay = tuple[float, int, tuple[str, ...]]


def served_together(known: Mapping[str, SlotPace], generators: int, *, shared: bool) -> tuple[dict[str, SlotPace], int]:
    """Slots that are served in common, and by how many generators.

    Where slots have generators of their own, by the routing (not shared) or by their sharding, one of these is looked
    at: the one with the most rows.
    """
    free = [name for name, pace in known.items() if not pace.generator]
    if shared and len(free) == len(known):
        return dict(known), generators
    loads: dict[str, int] = {}
    for pace in known.values():
        loads[pace.generator] = loads.get(pace.generator, 0) + (pace.most if pace.generator else 0)
    busiest, share = max(loads, key=lambda name: loads[name]), {*free[::generators]}
    return {name: pace for name, pace in known.items() if name in share or (busiest and pace.generator == busiest)}, 1


def snapshot_loop(
    known: Mapping[str, SlotPace],
    passes: Iterable[UnderWay],
    service: ServiceTime,
    buckets: tuple[int, ...],
    generators: int,
    now: float,
) -> ClosedLoop:
    """The loop of these slots at `now`."""
    number = {name: index for index, name in enumerate(known)}
    calls: list[tuple[float, int, tuple[int, ...]]] = []
    served: set[int] = set()
    under_way = [one for one in passes if any(slot in number for slot in one[2])]
    for began, rows, slots in under_way[:generators]:
        batch = tuple(number[slot] for slot in slots if slot in number)
        calls.append((max(0.0, began + service.of(padded(rows, buckets)) - now), PASS, batch))
        served.update(batch)
    waiting = []
    for index, pace in enumerate(known.values()):
        if pace.is_away:
            calls.append((max(0.0, pace.since + pace.away[pace.turn % len(pace.away)] - now), index, ()))
        elif index not in served:
            waiting.append((pace.since - now, index))
    return ClosedLoop(
        [pace.rows for pace in known.values()],
        [pace.absences() for pace in known.values()],
        generators,
        service.base,
        service.per_row,
        sorted(waiting),
        calls,
        buckets,
    )
