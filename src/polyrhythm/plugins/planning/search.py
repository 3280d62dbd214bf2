"""Searches for a placement: RLinf's algorithm 1 proposes, the simulated cluster judges. Pure but for the judge.

    WorkflowGraph, Costs ──find_schedules──▶ Schedules ──propose──▶ Arrangements by estimate ──search──▶ judged ones

**Schedules** (`find_schedules`): cut the graph in two, recursively. The parts have the same devices, one after the
other (temporal: times add up, and so do the switches of what has to leave), or disjoint ones, beside each other
(spatial: a pipeline of `parts` pieces, which takes its slowest stage and the others' first piece, the warm-up). A cycle
is one node: its members are together on its devices, or alternate on disjoint ones. Memory rules schedules out.
Sub-problems are kept by node set and number of devices. Rollout may be `ahead` versions, so that in the steady state
only the slowest stage counts if the whole fits into 1 + `ahead` versions.

**Arrangements** (`propose`): the schedules' seats with every choice of sharing, env batches, slots, rows of a pass and
micro-batch, in the order of an estimate. **Search**: judge the best few, then the neighbours of the best ones.
Invariant: what memory rules out is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Protocol, TypeVar

from polyrhythm.plugins.planning.arrangement import Arrangement, neighbours, reshaped
from polyrhythm.plugins.planning.graph import Component, WorkflowGraph

#: What a judge says of an arrangement.
J = TypeVar("J")
#: Schedules that are kept for each set of nodes and number of devices.
_KEPT = 6
#: Pieces of a pipeline that are tried.
_PARTS = (1, 2, 4, 8, 16, 32)
#: Devices are cut into at most so many places.
_PLACES = 16
#: Proposals that are judged in any case; arrangements that are judged at most, briefly; and of these again, in full.
FIRST, MOST, AGAIN = 12, 40, 5


class Costs(Protocol):
    """What nodes take, for one version."""

    def seconds(self, node: str, devices: int, parts: int) -> float:
        """Of a node on so many devices, its work in so many pieces; infinite if it cannot be divided over them. For a
        node on the hosts `devices` is 0."""

    def memory(self, node: str, devices: int) -> int:
        """Bytes on each of its devices."""

    def switch(self, node: str) -> float:
        """Seconds to leave a device and come back."""

    def on_host(self, node: str) -> bool:
        """Whether it needs no device."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Nodes on devices. seats: node → first device and number of devices; seconds: of a version; memory: bytes on each
    device; parts: pieces of a version that flow through its pipeline; turns: nodes leave their devices for each other;
    text: `a | b` beside each other, `a ; b` after each other."""

    seats: tuple[tuple[str, tuple[int, int]], ...]
    seconds: float
    memory: tuple[int, ...]
    parts: int
    text: str
    turns: bool = False

    def moved(self, by: int) -> Schedule:
        """The same on devices from `by` on."""
        if not by:
            return self
        seats = tuple((node, (first + by, count)) for node, (first, count) in self.seats)
        return replace(self, seats=seats)

    def padded(self, count: int) -> Schedule:
        """The same on the first of `count` devices; the others are idle."""
        return replace(self, memory=self.memory + (0,) * (count - len(self.memory)))

    def last(self, count: int) -> Schedule:
        """The same on the last of `count` devices: the first generators are the first to be asked."""
        idle = count - len(self.memory)
        return replace(self.moved(idle), memory=(0,) * idle + self.memory)


def find_schedules(
    graph: WorkflowGraph,
    devices: int,
    costs: Costs,
    *,
    room: int = 0,
    ahead: float = 0.0,
    pieces: int = _PARTS[-1],
    kept: int = _KEPT,
) -> list[Schedule]:
    """The best schedules, fastest first. room: bytes of a device, 0: not known; ahead: versions that an earlier part
    may be ahead of a later one; pieces: of a version that are handed on, at most; kept: how many schedules."""

    @cache
    def solve(parts: tuple[Component, ...], count: int) -> tuple[Schedule, ...]:
        found: list[Schedule] = []
        if len(parts) == 1:
            found += _component(parts[0], count, costs)
        else:
            for first, second in graph.cuts(parts):
                found += _together(solve(first, count), solve(second, count), costs)
                for own in _fewer(count, first, second, costs):
                    found += _together([one.padded(count) for one in solve(first, own)], solve(second, count), costs)
                    found += _together(solve(first, count), [one.last(count) for one in solve(second, own)], costs)
                for own in _shares(count, first, second, costs):
                    pairs = product(solve(first, own), solve(second, count - own))
                    found += [_beside(one, other, own, costs, ahead, pieces) for one, other in pairs]
        fitting = [one for one in found if one.seconds < math.inf and (not room or max(one.memory, default=0) <= room)]
        return tuple(_best(fitting, kept))

    return list(solve(graph.components(), devices))


def _best(schedules: Iterable[Schedule], kept: int) -> list[Schedule]:
    """The fastest ones with different seats."""
    found: dict[object, Schedule] = {}
    for one in sorted(schedules, key=lambda one: one.seconds):
        found.setdefault((one.seats, one.turns), one)
        if len(found) == kept:
            break
    return list(found.values())


def _shares(count: int, first: Sequence[Component], second: Sequence[Component], costs: Costs) -> Iterator[int]:
    """Numbers of devices that the first of two parts may have of `count`."""
    hosted = [all(costs.on_host(node) for part in parts for node in part) for parts in (first, second)]
    if hosted[0] or hosted[1]:
        yield 0 if hosted[0] else count
        return
    step = max(1, count // _PLACES)
    yield from range(step, count, step)


def _fewer(count: int, first: Sequence[Component], second: Sequence[Component], costs: Costs) -> Iterator[int]:
    """Numbers of devices that only one of two parts may have of those of the other."""
    if not any(all(costs.on_host(node) for part in parts for node in part) for parts in (first, second)):
        step = max(1, count // _PLACES)
        yield from range(step, count, step)


def _component(nodes: Component, count: int, costs: Costs) -> Iterator[Schedule]:
    """The schedules of a node, or of a cycle: its members on the same devices, or divided in all ways in two."""
    placed = [node for node in nodes if not costs.on_host(node)]
    hosted = [node for node in nodes if costs.on_host(node)]
    if placed and not count:
        return
    name = " ~ ".join(nodes)
    for parts in _PARTS if len(nodes) > 1 else (1,):
        own = [costs.seconds(node, count, parts) for node in placed]
        away = [costs.seconds(node, 0, parts) for node in hosted]
        seconds = _alternating([sum(own), *away], parts)
        memory = (sum(costs.memory(node, count) for node in placed),) * count if placed else (0,) * count
        seats = tuple((node, (0, 0 if node in hosted else count)) for node in nodes)
        yield Schedule(seats, seconds, memory, parts, name)
    if len(placed) < 2:
        return
    step = max(1, count // _PLACES)
    for cut in range(1, len(placed)):
        for first in range(step, count, step):
            groups = ((placed[:cut], 0, first), (placed[cut:], first, count - first))
            for parts in _PARTS:
                times = [sum(costs.seconds(node, size, parts) for node in own) for own, _, size in groups]
                times += [costs.seconds(node, 0, parts) for node in hosted]
                memory = tuple(
                    sum(costs.memory(node, size) for node in own) for own, _, size in groups for _ in range(size)
                )
                seats = tuple((node, (start, size)) for own, start, size in groups for node in own)
                seats += tuple((node, (0, 0)) for node in hosted)
                text = " ~ ".join(" + ".join(own) for own, _, _ in groups)
                yield Schedule(seats, _alternating(times, parts), memory, parts, text)


def _alternating(times: Sequence[float], parts: int) -> float:
    """A cycle whose members work on `parts` pieces in turn: the slowest member, or the way of a piece around it."""
    return max(*times, sum(times) / parts)


def _together(firsts: Sequence[Schedule], seconds: Sequence[Schedule], costs: Costs) -> Iterator[Schedule]:
    """One after the other on the same devices: staying there together, or leaving for each other."""
    for one, other in product(firsts, seconds):
        seats, total = one.seats + other.seats, one.seconds + other.seconds
        text, parts = f"({one.text} ; {other.text})", max(one.parts, other.parts)
        both = tuple(a + b for a, b in zip(one.memory, other.memory, strict=True))
        yield Schedule(seats, total, both, parts, text, one.turns or other.turns)
        switches = sum(costs.switch(node) for node, (_, count) in seats if count)
        largest = tuple(max(a, b) for a, b in zip(one.memory, other.memory, strict=True))
        yield Schedule(seats, total + switches, largest, parts, text, turns=True)


def _beside(one: Schedule, other: Schedule, own: int, costs: Costs, ahead: float, most: int) -> Schedule:
    """Beside each other on disjoint devices, in the best number of pieces."""
    slowest = max(one.seconds, other.seconds)
    total = one.seconds + other.seconds
    best, parts = math.inf, 1
    for pieces in (number for number in _PARTS if number <= most):
        more = sum(_overhead(schedule, costs, pieces) for schedule in (one, other))
        piped = total / pieces + slowest * (pieces - 1) / pieces + more
        seconds = max(slowest, piped / (1 + ahead))
        if seconds < best:
            best, parts = seconds, pieces
    seats = one.seats + other.moved(own).seats
    text, memory = f"({one.text} | {other.text})", one.memory + other.memory
    return Schedule(seats, best, memory, max(parts, one.parts, other.parts), text, one.turns or other.turns)


def _overhead(schedule: Schedule, costs: Costs, pieces: int) -> float:
    """What nodes take longer in so many pieces than in one."""
    return sum(
        max(0.0, costs.seconds(node, count, pieces) - costs.seconds(node, count, 1))
        for node, (_, count) in schedule.seats
        if count
    )


# ------------------------------------------------------------ arrangements


@dataclass(frozen=True, slots=True)
class Choices:
    """Values that a search tries. env_batches, slots, max_rows, max_requests, micro_batch, sharing, simulators,
    generators: of an `Arrangement`; for stations on devices, simulators and generators are per device."""

    sharing: tuple[str, ...] = ("share",)
    simulators: tuple[int, ...] = (1,)
    generators: tuple[int, ...] = (1,)
    env_batches: tuple[int, ...] = (1,)
    slots: tuple[int, ...] = (1,)
    max_rows: tuple[int, ...] = (64,)
    max_requests: tuple[int, ...] = (1_000_000,)
    micro_batch: tuple[int, ...] = (0,)

    def steps(self) -> dict[str, Sequence[Any]]:
        """Those that `neighbours` moves one at a time."""
        names = ("sharing", "env_batches", "slots", "max_rows", "max_requests", "micro_batch")
        return {name: getattr(self, name) for name in names}


def seat_sets(schedules: Iterable[Schedule]) -> Iterator[tuple[dict[str, tuple[int, ...]], bool]]:
    """The devices of each node, and whether they are taken in turn, of different schedules."""
    seen = set()
    for one in schedules:
        seats = {node: tuple(range(first, first + count)) for node, (first, count) in one.seats}
        key = (tuple(sorted(seats.items())), one.turns)
        if key not in seen:
            seen.add(key)
            yield seats, one.turns


def propose(
    base: Arrangement, schedules: Iterable[Schedule], choices: Choices, estimate: Callable[[Arrangement], float]
) -> list[Arrangement]:
    """Every arrangement of the schedules' seats and the choices, each with its best micro-batch, the fastest by
    `estimate` (seconds of a version) first; infinite ones are left out."""
    found: dict[Arrangement, float] = {}
    for seats, turns in seat_sets(schedules):
        for one in _with_seats(base, seats, turns, choices):
            if one not in found:
                sizes = [replace(one, micro_batch=size) for size in choices.micro_batch]
                best = min(sizes, key=estimate)
                found |= {one: math.inf, best: estimate(best)}
    fitting = [one for one, seconds in found.items() if seconds < math.inf]
    return sorted(fitting, key=found.__getitem__)


def _with_seats(
    base: Arrangement, seats: Mapping[str, tuple[int, ...]], turns: bool, choices: Choices
) -> Iterator[Arrangement]:
    simulates, generates, trains = (seats.get(kind, ()) for kind in ("simulator", "generator", "trainer"))
    shared = bool({*generates, *simulates} & {*trains})
    for sharing in choices.sharing if shared else ("share",):
        if turns != (sharing == "lease"):
            continue
        counts = product(choices.simulators, choices.generators, choices.env_batches)
        for simulators, generators, env_batches in counts:
            found = reshaped(
                base,
                simulators=simulators * len(simulates) if simulates else simulators,
                generators=generators * max(1, len(generates)),
                env_batches=env_batches,
                slots=1,
                max_rows=0,
                sharing=sharing,
                simulator_devices=simulates,
                generator_devices=generates,
                trainer_devices=trains,
            )
            if found is None:
                continue
            for slots, max_rows, requests in product(choices.slots, choices.max_rows, choices.max_requests):
                cut = reshaped(found, slots=slots, max_rows=max_rows, max_requests=requests, micro_batch=-1)
                if cut is not None:
                    yield cut


def search(
    proposals: Sequence[Arrangement],
    choices: Choices,
    judge: Callable[[Sequence[Arrangement]], Sequence[J | None]],
    rate: Callable[[J], float],
    *,
    first: int = FIRST,
    most: int = MOST,
) -> list[tuple[Arrangement, J]]:
    """Judge the `first` proposals, then the neighbours of the best one of each set of seats, the fastest first, until
    none of them has better ones or `most` are judged. If none of the first can be, up to `most` others are tried.

    judge: several at a time; None for what cannot be. rate: larger is better. The result is the judged ones, the best
    first.
    """
    known: dict[Arrangement, J] = {}
    tried: set[Arrangement] = set()
    expanded: set[Arrangement] = set()

    def try_all(those: Iterable[Arrangement]) -> None:
        rest = [one for one in dict.fromkeys(those) if one not in tried]
        while rest and len(known) < most:
            own, rest = rest[: most - len(known)], rest[most - len(known) :]
            tried.update(own)
            known.update({one: found for one, found in zip(own, judge(own), strict=True) if found is not None})

    def ranked() -> list[Arrangement]:
        return sorted(known, key=lambda one: -rate(known[one]))

    try_all(varied(proposals, first))
    for one in [other for other in proposals if other not in tried][: 0 if known else most]:
        try_all([one])
        if known:
            break
    while len(known) < most:
        leaders = {_where(one): one for one in reversed(ranked())}  # the best one of each set of seats
        best = next((one for one in ranked() if one in leaders.values() and one not in expanded), None)
        if best is None:
            break
        expanded.add(best)
        try_all(neighbours(best, choices.steps()))
    return [(one, known[one]) for one in ranked()]


def varied(proposals: Sequence[Arrangement], count: int) -> list[Arrangement]:
    """The first `count` proposals, one for each set of seats and sharing as long as there are others."""
    taken: list[Arrangement] = []
    rest: list[Arrangement] = []
    seen: dict[object, int] = {}
    for one in proposals:
        key = _where(one)
        seen[key] = seen.get(key, 0) + 1
        (taken if seen[key] == 1 else rest).append(one)
        if len(taken) == count:
            break
    return [*taken, *rest][:count]


def _where(one: Arrangement) -> object:
    return one.simulator_devices, one.generator_devices, one.trainer_devices, one.sharing
