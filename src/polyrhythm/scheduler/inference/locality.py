"""Locality: of generators that could serve the same requests at the same moment, those on the requests' hosts.

The observations of a request lie on its simulator's host; a generator on another host fetches them when it serves the
request. The rule only exchanges what starts at the same moment, so it costs no waiting:

- batches exchange requests of equal rows, so that more of them lie where their batch is served;
- where fewer batches start than generators are idle, each goes to one on the host where most of its rows lie.

Invariants (`deal`): the same requests start at the same moment, in batches of the same rows as without the rule; and no
fewer rows are served where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.records import Request

Batches = list[tuple[Request, ...]]
#: The host of a request's simulator.
HostOf = Callable[[Request], str]


def deal(
    batches: Batches, idle: Sequence[GeneratorState], host_of: HostOf
) -> list[tuple[GeneratorState, tuple[Request, ...]]]:
    """The batches, dealt anew, each with its generator. idle: as many as there are batches or more, in the order in
    which they are offered work."""
    plain = list(idle[: len(batches)])
    options = [(near, exchange(batches, near, host_of)) for near in (plain, _nearest(batches, idle, host_of))]
    chosen, dealt = max(options, key=lambda option: _local_rows(option[0], option[1], host_of))
    return list(zip(chosen, dealt, strict=True))


def exchange(batches: Batches, generators: Sequence[GeneratorState], host_of: HostOf) -> Batches:
    """The same requests in batches of the same rows, as many of them as can be where their generator is. A batch keeps
    the order in which its requests came."""
    requests = [request for batch in batches for request in batch]
    order = {request.slot: place for place, request in enumerate(requests)}
    dealt: list[list[Request]] = [[] for _ in batches]
    places = [_count_by_rows(batch) for batch in batches]
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
    """For each batch, the largest first, the idle generator on whose host most of its rows lie, else the first."""
    left, chosen = list(idle), dict[int, GeneratorState]()
    for place in sorted(range(len(batches)), key=lambda place: -sum(request.rows for request in batches[place])):
        best = max(left, key=lambda generator: _local_rows([generator], [batches[place]], host_of))
        left.remove(best)
        chosen[place] = best
    return [chosen[place] for place in range(len(batches))]


def _count_by_rows(batch: Sequence[Request]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for request in batch:
        counts[request.rows] = counts.get(request.rows, 0) + 1
    return counts


def _local_rows(generators: Sequence[GeneratorState], batches: Batches, host_of: HostOf) -> int:
    """Rows that are served on their host."""
    pairs = zip(generators, batches, strict=True)
    return sum(request.rows for own, batch in pairs for request in batch if host_of(request) == own.host)
