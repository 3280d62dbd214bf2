"""From waiting requests to batches: queue, batching rule and routing over the present generators.

Invariants: a request is in the queue, in exactly one batch under way, or answered; an idle generator with a due batch
never waits; a generator never serves a request whose tickets are newer than its weights.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from polyrhythm.scheduler.autobatch.tuning import BatchTuner
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import BatchLimits, Waiting, due_at, is_due, split_evenly
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY, RequestQueue
from polyrhythm.scheduler.inference.routing import Router, next_idle
from polyrhythm.scheduler.inference.versions import VersionLedger
from polyrhythm.scheduler.records import Batch, BatchingChosen, RefuseRequest, Request, Serve
from polyrhythm.scheduler.rollout.rows import RowRegistry, SlotState
from polyrhythm.scheduler.settings import SchedulerSettings


@dataclass(slots=True)
class BatchScheduler:
    """live: generators that hold new enough weights, by name; the others are neither waited for nor given requests.

    idle: live ones that could start a pass now. Every queued request belongs to a live slot. generators: those that
    serve training; apart: the evaluator, where it serves nothing else; aside: requests of reserved slots, oldest first,
    which the evaluator alone serves, with its pinned weights.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    queue: RequestQueue
    router: Router
    generators: dict[str, GeneratorState] = field(default_factory=dict)
    live: list[str] = field(default_factory=list)
    idle: dict[str, None] = field(default_factory=dict)
    apart: dict[str, GeneratorState] = field(default_factory=dict)
    aside: list[Request] = field(default_factory=list)
    batches: int = 0
    tuning: BatchTuner | None = None

    @property
    def limits(self) -> BatchLimits:
        """When a batch is due, at present."""
        return self.settings if self.tuning is None else self.tuning.limits

    def join(self, generator: GeneratorState) -> None:
        if generator.name == self.settings.evaluator and self.settings.evaluator_only:
            self.apart[generator.name] = generator
            return
        self.generators[generator.name] = generator
        self.generators = {name: self.generators[name] for name in sorted(self.generators)}

    def find(self, name: str) -> GeneratorState | None:
        """The present generator of this name."""
        return self.generators.get(name) or self.apart.get(name)

    @property
    def evaluator(self) -> GeneratorState | None:
        return self.find(self.settings.evaluator)

    def leave(self, name: str, rows: RowRegistry) -> list[RefuseRequest]:
        """Its batch goes back to the queue with the old arrival times; what was bound to it is anybody's.

        So do requests that it said it had answered, where the slot has not been heard since: the answer may have been
        lost with it, and a second one does no harm. A slot without tickets had its reply before the generator was
        lost, or its rows were cancelled: it is refused.
        """
        generator = self.apart.pop(name) if name in self.apart else self.generators.pop(name)
        self.idle.pop(name, None)
        if self.tuning is not None:
            self.tuning.remove_generator(name)
        self.live = [other for other in self.live if other != name]
        self.queue.move_all(name, ANY)
        self.router.forget_generator(name)
        refusals = []
        for request, slot in (*_unanswered(generator, rows), *_unconfirmed(name, rows)):
            slot.answered_by = ""
            if slot.tickets:
                slot.request = request
                self.enqueue(request, slot)
            else:
                slot.request = None
                refusals.append(RefuseRequest(slot.simulator, slot.name, request.sequence, "its rows hold no tickets"))
        return refusals

    def hear(self, request: Request, slot: SlotState, now: float) -> None:
        """A request that arrived now."""
        if self.tuning is not None and not slot.reserved:
            self.tuning.on_request(request, now)
        self.enqueue(request, slot)

    def enqueue(self, request: Request, slot: SlotState) -> None:
        if slot.reserved:
            self.aside.append(request)
            return
        self.queue.push(request, self.router.pool(request, slot.ordinal, self.live))

    def remove(self, slot: str) -> Request | None:
        """Take the slot's request out of its queue, if it waits there."""
        request = next((request for request in self.aside if request.slot == slot), None)
        if request is None:
            return self.queue.remove(slot)
        self.aside.remove(request)
        return request

    def forget(self, slot: str) -> None:
        """The slot is gone, with what it asked."""
        self.remove(slot)
        self.router.forget_slot(slot)
        if self.tuning is not None:
            self.tuning.remove_slot(slot)

    def finish(self, generator: GeneratorState, rows: RowRegistry, now: float) -> None:
        """The generator's pass is over and its replies are out."""
        answered = [slot for _, slot in _unanswered(generator, rows)]
        for slot in answered:
            slot.request, slot.answered_by = None, generator.name
        if self.tuning is not None and generator.batch is not None and not generator.batch.pinned:
            self.tuning.on_pass_finished(generator.name, [slot.name for slot in answered], now, len(self.live))
        generator.batch = None
        if generator.name in self.live:
            self.idle[generator.name] = None

    def note_weights(self, versions: VersionLedger) -> None:
        """Weights moved: note which generators are live, and which of them could start a pass."""
        self.live = [name for name, generator in self.generators.items() if versions.is_live(generator)]
        self.idle = {name: None for name in self.live if not self.generators[name].busy}

    def announce(self) -> list[BatchingChosen]:
        """What was just chosen, once."""
        choice = None if self.tuning is None else self.tuning.take_announcement()
        return [] if choice is None else [choice]

    def serve(self, rows: RowRegistry, now: float) -> list[Serve]:
        """Start every batch that is due; of training's and those aside, what an evaluator of both begins with first."""
        if not self.aside:
            return self._serve_training(rows, now)
        if self._aside_is_first(now):
            return [*self._serve_aside(), *self._serve_training(rows, now)]
        return [*self._serve_training(rows, now), *self._serve_aside()]

    def _aside_is_first(self, now: float) -> bool:
        """Whether evaluation goes before training, where both could: by `evaluation_priority`.

        `last`: not before it has waited for `evaluation_max_wait_s`, so that training never starves it.
        """
        priority, evaluator = self.settings.evaluation_priority, self.evaluator
        if priority == "last":
            oldest = min(request.arrived for request in self.aside)
            return now >= oldest + self.settings.evaluation_max_wait_s
        return priority == "first" or evaluator is None or not evaluator.was_pinned

    def _serve_training(self, rows: RowRegistry, now: float) -> list[Serve]:
        idle, waiting = self.idle, self.queue.orders
        if not idle or not waiting:
            return []
        complete = len(waiting) == rows.live
        if self.settings.batching == "lockstep":
            return self._serve_all() if complete else []
        bound = [name for name in self.queue.bound if name in idle]
        started = [
            self._start_next(self.generators[name], now) for name in bound if self._is_due((ANY, name), complete, now)
        ]
        while idle and waiting and self._is_due((ANY,), complete, now):
            started.append(self._start_next(next_idle(self.generators[name] for name in self.idle), now))
        return started

    def _serve_aside(self) -> list[Serve]:
        evaluator = self.evaluator
        if evaluator is None or evaluator.busy or evaluator.pinned < 0:
            return []
        requests, self.aside = tuple(self.aside), []
        return [self._start(evaluator, requests, pinned=True)]

    def _is_due(self, pools: tuple[str, ...], complete: bool, now: float) -> bool:
        return is_due(Waiting(*self.queue.view(pools), complete), self.limits, now)

    def _start_next(self, generator: GeneratorState, now: float) -> Serve:
        limits = self.limits
        serve = self._start(generator, self.queue.take((ANY, generator.name), limits.max_rows, limits.max_requests))
        if self.tuning is not None:
            self.tuning.on_pass_started(generator.name, serve.batch.requests, now)
        return serve

    def deadline(self) -> float:
        """When the next batch of an idle generator becomes due by the clock; infinite if none waits."""
        if not self.idle or not self.queue.orders or self.settings.batching == "lockstep":
            return float("inf")
        _, _, oldest = self.queue.view([ANY, *(name for name in self.queue.bound if name in self.idle)])
        return due_at(oldest, self.limits)

    def _serve_all(self) -> list[Serve]:
        if len(self.idle) < len(self.live):
            return []
        generators = [self.generators[name] for name in self.live]
        common = self.queue.take((ANY,), sys.maxsize, len(self.queue))
        shares = split_evenly(common, len(generators)) if common else [()] * len(generators)
        started = []
        for generator, share in zip(generators, shares, strict=True):
            own = self.queue.take((generator.name,), sys.maxsize, len(self.queue))
            if share or own:
                started.append(self._start(generator, share + own))
        return started

    def _start(self, generator: GeneratorState, requests: tuple[Request, ...], *, pinned: bool = False) -> Serve:
        held = generator.pinned if pinned else generator.version
        for request in requests:
            assert request.version <= held, "weights older than a ticket"
            generator.served_rows += request.rows
        self.batches += 1
        generator.batch = Batch(self.batches, generator.name, requests, pinned)
        generator.was_pinned = pinned
        self.idle.pop(generator.name, None)
        if not pinned:
            self.router.served(requests, generator.name)
        return Serve(generator.name, generator.batch)


def _unanswered(generator: GeneratorState, rows: RowRegistry) -> list[tuple[Request, SlotState]]:
    """The requests of the pass under way whose slots still wait for them; others are gone or have gone on."""
    requests = generator.batch.requests if generator.batch else ()
    slots = [(request, rows.slots.get(request.slot)) for request in requests]
    # Mostly it is the same object; after a resumption it is only equal.
    return [
        (request, slot)
        for request, slot in slots
        if slot is not None and (slot.request is request or slot.request == request)
    ]


def _unconfirmed(generator: str, rows: RowRegistry) -> list[tuple[Request, SlotState]]:
    """The requests that this generator says it has answered, of slots that have not been heard since."""
    return [(slot.asked, slot) for slot in rows.slots.values() if slot.asked and slot.answered_by == generator]
