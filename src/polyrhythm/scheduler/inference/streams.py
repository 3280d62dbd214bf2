"""Serving by streams (continuous batching): each request begins as soon as a generator has places for its rows.

A generator has `max_rows` places; a stream takes one for each row of its request until its end is reported. Requests go
in key order, each to the generator with the fewest rows under way of those that may serve it; one with more rows than
places goes alone. The stream of a slot that stops (its sample was cancelled: filtered, surplus, past its deadline) or
is lost with its simulator is aborted. Weights change between two decode steps, whatever streams are under way
(`weights`).

Invariants: those of `serving`; a generator never has streams of more rows than places, unless it has one alone; the
first request of its pools never waits while a live generator that applies no weights has places for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler import records
from polyrhythm.scheduler.inference.batching import has_place
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.inference.serving import RequestScheduler
from polyrhythm.scheduler.records import AbortStream, RefuseRequest, Request, RequestArrived, StartStream, Stream


@dataclass(slots=True)
class StreamScheduler(RequestScheduler):
    """started: counter that numbers the streams; answering: slot → the stream that answers its request, if any."""

    started: int = 0
    answering: dict[str, Stream] = field(default_factory=dict)

    def remove_slots(self, simulator: str) -> list[AbortStream]:
        lost = [slot.name for slot in self.slots.slots.values() if slot.simulator == simulator]
        RequestScheduler.remove_slots(self, simulator)
        streams = [self.answering.pop(slot) for slot in lost if slot in self.answering]
        return [AbortStream(stream.generator, stream.number) for stream in streams]

    def remove_generator(self, name: str) -> list[RefuseRequest]:
        refusals = RequestScheduler.remove_generator(self, name)
        self.answering = {slot: stream for slot, stream in self.answering.items() if stream.generator != name}
        return refusals

    def on_live_change(self, name: str, *, live: bool) -> list[RefuseRequest | AbortStream]:
        """Also aborts the stream of a slot that stopped. Its reply may be under way already, which does no harm."""
        commands = RequestScheduler.on_live_change(self, name, live=live)
        stream = None if live else self.answering.pop(name, None)
        if stream is None:
            return commands
        slot = self.slots.slots[name]
        slot.request = None
        refusal = RefuseRequest(slot.simulator, name, stream.request.sequence, "its rows were cancelled")
        return [AbortStream(stream.generator, stream.number), refusal]

    def on_request(self, event: RequestArrived, now: float) -> None:
        self.answering.pop(event.slot, None)  # answered, though its generator has not reported it yet
        RequestScheduler.on_request(self, event, now)

    def end(self, generator: GeneratorState, event: records.StreamDone) -> Stream:
        """Remove the stream; its reply is sent unless it was aborted."""
        stream = generator.streams.pop(event.stream)
        generator.load -= 0 if stream.pinned else stream.request.rows
        name = stream.request.slot
        if self.answering.get(name) == stream:
            del self.answering[name]
            slot = self.slots.slots[name]
            slot.request, slot.answered_by = None, generator.name
        return stream

    def due(self, now: float) -> list[StartStream]:  # noqa: ARG002 - time alone makes nothing due
        """Start every stream for which there are places."""
        started = self._start_background()
        while (found := self._next()) is not None:
            generator, request = found
            self.queue.remove(request.slot)
            self.router.served((request,), generator.name)
            started.append(self._start(generator, request))
        return started

    def deadline(self, due_away: Sequence[str] = ()) -> float:  # noqa: ARG002 - the contract of serving
        """Time alone makes no stream due."""
        return float("inf")

    def due_away(self, now: float) -> list[str]:  # noqa: ARG002 - time alone makes nothing due
        """Generators with a due stream that are off their leased devices."""
        present = self.generators.present
        return [name for name in self.generators.away if self._first(present[name]) is not None]

    def _next(self) -> tuple[GeneratorState, Request] | None:
        idle, queue = self.generators.idle, self.queue
        if not idle or not queue.orders:
            return None
        present = self.generators.present
        order = [present[name] for name in idle]
        if queue.bound:
            order.sort(key=_by_load)
        else:
            order = [self._nearest(order)]  # if it has no places for the first request, none has
        found = ((generator, self._first(generator)) for generator in order)
        return next(((generator, request) for generator, request in found if request is not None), None)

    def _nearest(self, generators: Sequence[GeneratorState]) -> GeneratorState:
        """The generator with the fewest rows under way, or one on the first request's host that is at least as good.
        That one must have places for the request, and no more rows under way than the other would have with it."""
        least = min(generators, key=_by_load)
        request = self.queue.peek((ANY,)) if self.generators.several_hosts else None
        if request is None:
            return least
        host, rows = self.host_of(request), request.rows
        near = [own for own in generators if own.host == host and self._fits(own.load, request)]
        own = min(near, key=_by_load, default=least)
        return own if own.load <= least.load + rows else least

    def _first(self, generator: GeneratorState) -> Request | None:
        """The first request that this generator may serve, if it has places for it."""
        request = self.queue.peek((ANY, generator.name))
        return request if request is not None and self._fits(generator.load, request) else None

    def _fits(self, load: int, request: Request) -> bool:
        return has_place(load, request.rows, self.settings.max_rows)

    def _start_background(self) -> list[StartStream]:
        """Start evaluation streams: the evaluator has `max_rows` further places for its second copy."""
        evaluator = self.generators.evaluator
        if not self.background or evaluator is None or evaluator.busy or evaluator.pinned < 0:
            return []
        load = sum(stream.request.rows for stream in evaluator.streams.values() if stream.pinned)
        started = []
        while self.background and self._fits(load, self.background[0]):
            request = self.background.pop(0)
            load += request.rows
            started.append(self._start(evaluator, request, pinned=True))
        return started

    def _start(self, generator: GeneratorState, request: Request, *, pinned: bool = False) -> StartStream:
        assert request.version <= (generator.pinned if pinned else generator.version), "weights older than a ticket"
        self.started += 1
        stream = Stream(self.started, generator.name, request, pinned)
        generator.streams[stream.number] = self.answering[request.slot] = stream
        generator.served_rows += request.rows
        generator.load += 0 if pinned else request.rows
        return StartStream(generator.name, stream)


def _by_load(generator: GeneratorState) -> tuple[int, int, str]:
    return generator.load, generator.served_rows, generator.name
