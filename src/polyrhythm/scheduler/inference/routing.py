"""Routing: which generator serves a request.

`least_loaded` binds late: requests wait in common and the idle generator that has served the fewest rows takes the next
batch, so no request waits behind a busy generator while another is idle. On several hosts it prefers generators on the
requests' hosts where that costs no waiting (`locality`).
`round_robin` deals requests out in turn as they arrive; `fixed` binds slot i to generator i mod n.
`affinity`: a slot stays with the generator that served it, whose caches know it; its first one is that with the fewest
rows bound to it. It moves only to rebalance after generators join or slots leave.
A slot that its sharding binds to a named generator stays bound. A binding to a generator that is gone is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.records import Request


@dataclass(slots=True)
class Router:
    """rule: `SchedulerSettings.routing`; turn: requests dealt out so far.

    bindings: of `affinity`, slot → (generator, rows of the request that bound it); loads: their rows by generator.
    """

    rule: str
    turn: int = 0
    bindings: dict[str, tuple[str, int]] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)

    def pool(self, request: Request, ordinal: int, generators: Sequence[str]) -> str:
        """Pool in which a request waits. ordinal: its slot's number; generators: present ones, in order of name."""
        named = request.generator is not None and request.generator in generators
        if named or not generators or self.rule in ("least_loaded", "fixed"):
            return self.expected_pool(request.slot, request.generator, ordinal, generators)
        if self.rule == "affinity":
            return self._own(request, generators)
        self.turn += 1
        return generators[(self.turn - 1) % len(generators)]

    def expected_pool(self, slot: str, named: str | None, ordinal: int, generators: Sequence[str]) -> str:
        """Pool in which the slot's next request will wait if generators and bindings stay as they are; ANY also where
        any generator may get it. named: the generator that its sharding names."""
        if named is not None and named in generators:
            return named
        if self.rule == "fixed" and generators:
            return generators[ordinal % len(generators)]
        own = self.bindings.get(slot, (ANY, 0))[0]  # empty but for `affinity`
        return own if own in generators else ANY

    def _own(self, request: Request, generators: Sequence[str]) -> str:
        """The generator that the slot is bound to; binds it if it has none that is present."""
        least = min(generators, key=lambda name: self.loads.get(name, 0))
        own, rows = self.bindings.get(request.slot, (ANY, 0))
        if own in generators and self.loads[own] <= self.loads.get(least, 0) + rows:
            return own
        self.bind(request, least)
        return least

    def served(self, requests: Sequence[Request], generator: str) -> None:
        """A generator serves these: `affinity` binds their slots to it."""
        if self.rule == "affinity":
            for request in requests:
                if self.bindings.get(request.slot, (ANY, 0))[0] != generator:
                    self.bind(request, generator)

    def bind(self, request: Request, generator: str) -> None:
        self.forget_slot(request.slot)
        self.bindings[request.slot] = (generator, request.rows)
        self.loads[generator] = self.loads.get(generator, 0) + request.rows

    def forget_slot(self, slot: str) -> None:
        """The slot is gone, or bound anew."""
        generator, rows = self.bindings.pop(slot, (ANY, 0))
        if generator != ANY:
            self.loads[generator] -= rows

    def forget_generator(self, generator: str) -> None:
        """The generator is gone, and all bindings to it."""
        if self.loads.pop(generator, None) is not None:
            self.bindings = {slot: bound for slot, bound in self.bindings.items() if bound[0] != generator}


def in_turn(generator: GeneratorState) -> tuple[int, str]:
    """The order in which idle generators are offered work."""
    return generator.served_rows, generator.name


def next_idle(idle: Iterable[GeneratorState]) -> GeneratorState:
    """The idle generator that is offered work first."""
    return min(idle, key=in_turn)
