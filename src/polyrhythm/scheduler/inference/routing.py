"""Routing: which generator serves a request.

`least_loaded` binds late: requests wait in a common pool, and the idle generator that has served the fewest rows takes
the next batch, so no request waits behind a busy generator while another is idle. `round_robin` assigns requests in
turn as they arrive; `fixed` binds slot i to generator i mod n. `affinity` binds a slot to the generator that first
served it, whose caches know it; the first one is that with the fewest bound rows. It moves only to rebalance after
generators join or slots leave. A slot that its sharding binds to a named generator stays bound. A binding to an absent
generator is void.

Several hosts: the observations of a request lie on its simulator's host; a generator on another host must fetch them.
`deal` exchanges only what starts at the same moment, so it costs no waiting:

- batches exchange requests of equal rows, so that more of them lie where their batch is served;
- where fewer batches start than generators are idle, each goes to one on the host where most of its rows lie.

Invariants (`deal`): the same requests start at the same moment, in batches of the same rows as without it; and at least
as many rows are served on their own host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.records import Request


@dataclass(slots=True)
class Router:
    """rule: `SchedulerSettings.routing`; turn: requests assigned so far. bindings (`affinity`): slot → (generator, rows
    of the request that bound it); loads: bound rows by generator."""

    rule: str
    turn: int = 0
    bindings: dict[str, tuple[str, int]] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)

    def pool(self, request: Request, ordinal: int, generators: Sequence[str]) -> str:
        """Pool in which a request waits. ordinal: its slot's number; generators: present ones, in name order."""
        named = request.generator is not None and request.generator in generators
        if named or not generators or self.rule in ("least_loaded", "fixed"):
            return self.expected_pool(request.slot, request.generator, ordinal, generators)
        if self.rule == "affinity":
            return self._own(request, generators)
        self.turn += 1
        return generators[(self.turn - 1) % len(generators)]

    def expected_pool(self, slot: str, named: str | None, ordinal: int, generators: Sequence[str]) -> str:
        """Pool of the slot's next request if generators and bindings stay as they are; ANY if any generator may get it.
        named: the generator that its sharding names."""
        if named is not None and named in generators:
            return named
        if self.rule == "fixed" and generators:
            return generators[ordinal % len(generators)]
        own = self.bindings.get(slot, (ANY, 0))[0]  # empty but for `affinity`
        return own if own != ANY and own in generators else ANY  # generators may be hundreds

    def _own(self, request: Request, generators: Sequence[str]) -> str:
        """The generator that the slot is bound to; binds it first if that generator is absent."""
        least = min(generators, key=lambda name: self.loads.get(name, 0))
        own, rows = self.bindings.get(request.slot, (ANY, 0))
        if own in generators and self.loads[own] <= self.loads.get(least, 0) + rows:
            return own
        self.bind(request, least)
        return least

    def served(self, requests: Sequence[Request], generator: str) -> None:
        """A generator serves these requests; `affinity` binds their slots to it."""
        if self.rule == "affinity":
            for request in requests:
                if self.bindings.get(request.slot, (ANY, 0))[0] != generator:
                    self.bind(request, generator)

    def bind(self, request: Request, generator: str) -> None:
        self.forget_slot(request.slot)
        self.bindings[request.slot] = (generator, request.rows)
        self.loads[generator] = self.loads.get(generator, 0) + request.rows

    def forget_slot(self, slot: str) -> None:
        generator, rows = self.bindings.pop(slot, (ANY, 0))
        if generator != ANY:
            self.loads[generator] -= rows

    def forget_generator(self, generator: str) -> None:
        if self.loads.pop(generator, None) is not None:
            self.bindings = {slot: bound for slot, bound in self.bindings.items() if bound[0] != generator}


def in_turn(generator: GeneratorState) -> tuple[int, str]:
    """Sort key of idle generators: fewest served rows first."""
    return generator.served_rows, generator.name


def next_idle(idle: Iterable[GeneratorState]) -> GeneratorState:
    return min(idle, key=in_turn)


Batches = list[tuple[Request, ...]]
#: The host of a request's simulator.
HostOf = Callable[[Request], str]


def deal(
    batches: Batches, idle: Sequence[GeneratorState], host_of: HostOf
) -> list[tuple[GeneratorState, tuple[Request, ...]]]:
    """The batches, each with its generator, rearranged so that more rows are served on their own host. idle: at least
    as many generators as batches, in the order in which they get work."""
    plain = list(idle[: len(batches)])
    options = [(near, exchange(batches, near, host_of)) for near in (plain, _nearest(batches, idle, host_of))]
    chosen, dealt = max(options, key=lambda option: _local_rows(option[0], option[1], host_of))
    return list(zip(chosen, dealt, strict=True))


def exchange(batches: Batches, generators: Sequence[GeneratorState], host_of: HostOf) -> Batches:
    """Batches of the same sizes with the same requests, as many of them as possible on their generator's host. A batch
    keeps the order in which its requests came."""
    requests = [request for batch in batches for request in batch]
    order = {request.slot: place for place, request in enumerate(requests)}
    dealt: list[list[Request]] = [[] for _ in batches]
    places = [Counter(request.rows for request in batch) for batch in batches]
    others: list[Request] = []
    for request in requests:
        host, rows = host_of(request), request.rows
        near = (i for i, generator in enumerate(generators) if generator.host == host and places[i].get(rows))
        if (own := next(near, None)) is None:
            others.append(request)
        else:
            dealt[own].append(request)
            places[own][rows] -= 1
    for request in others:
        free = next(i for i, left in enumerate(places) if left.get(request.rows))
        dealt[free].append(request)
        places[free][request.rows] -= 1
    return [tuple(sorted(batch, key=lambda request: order[request.slot])) for batch in dealt]


def _nearest(batches: Batches, idle: Sequence[GeneratorState], host_of: HostOf) -> list[GeneratorState]:
    """For each batch, largest first, the idle generator on the host of most of its rows, else the first one."""
    left, chosen = list(idle), dict[int, GeneratorState]()
    for place in sorted(range(len(batches)), key=lambda place: -sum(request.rows for request in batches[place])):
        rows = Counter[str]()  # by host: O(requests + generators) for each batch
        for request in batches[place]:
            rows[host_of(request)] += request.rows
        best = max(left, key=lambda generator: rows[generator.host])
        left.remove(best)
        chosen[place] = best
    return [chosen[place] for place in range(len(batches))]


def _local_rows(generators: Sequence[GeneratorState], batches: Batches, host_of: HostOf) -> int:
    pairs = zip(generators, batches, strict=True)
    return sum(request.rows for own, batch in pairs for request in batch if host_of(request) == own.host)
