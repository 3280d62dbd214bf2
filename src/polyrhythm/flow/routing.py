"""Which generator serves a request.

`least_loaded` binds late: requests wait in common and the idle generator that has served the fewest rows takes the next
batch, so no request waits behind a busy generator while another is idle.
`round_robin` deals requests out in turn as they arrive; `fixed` binds slot i to generator i mod n.
A slot that its sharding binds to a named generator stays bound. A binding to a generator that is gone is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from polyrhythm.flow.generators import GeneratorState
from polyrhythm.flow.requests import ANY


@dataclass(slots=True)
class Router:
    """rule: `FlowSettings.routing`; turn: requests dealt out so far."""

    rule: str
    turn: int = 0

    def pool(self, bound_to: str | None, ordinal: int, generators: Sequence[str]) -> str:
        """Pool in which a request waits. ordinal: the slot's number; generators: present ones, in order of name."""
        if bound_to is not None and bound_to in generators:
            return bound_to
        if not generators or self.rule == "least_loaded":
            return ANY
        if self.rule == "fixed":
            return generators[ordinal % len(generators)]
        self.turn += 1
        return generators[(self.turn - 1) % len(generators)]


def next_idle(idle: Iterable[GeneratorState]) -> GeneratorState:
    """The idle generator that is offered work first."""
    return min(idle, key=lambda generator: (generator.served_rows, generator.name))
