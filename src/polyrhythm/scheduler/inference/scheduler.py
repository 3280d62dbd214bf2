"""From waiting requests to batches, one forward pass each: queue, batching rule and routing over the generators.

The conductor's contract with serving: `hear` a request, `finish` a pass, then ask for the commands that are `due`, and
when the next one will be (`deadline`). Serving by streams (continuous batching) can stand beside this one with the
same contract: progress in the place of `finish`, and other commands from `due`.

Invariants: a request is in the queue, in exactly one batch under way, or answered; an idle generator with a due batch
never waits; a generator never serves a request whose tickets are newer than its weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.autobatch.tuning import BatchTuner
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import Waiting, due_at, is_due, split_evenly
from polyrhythm.scheduler.inference.generators import GeneratorRegistry, GeneratorState
from polyrhythm.scheduler.inference.requests import ANY, RequestQueue, load_key
from polyrhythm.scheduler.inference.routing import Router, next_idle
from polyrhythm.scheduler.inference.slots import ServedSlot, SlotRegistry
from polyrhythm.scheduler.inference.weights import WeightScheduler
from polyrhythm.scheduler.records import (
    Batch,
    BatchingChosen,
    EnvBatchInfo,
    GeneratorJoined,
    RefuseRequest,
    Request,
    RequestArrived,
    Serve,
)
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings


@dataclass(slots=True)
class BatchScheduler:
    """background: requests of reserved slots, oldest first: the evaluator alone serves them, with its pinned weights.
    batches: numbers the batches; limits: those in force. Every queued request belongs to a live slot."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    queue: RequestQueue
    router: Router
    slots: SlotRegistry
    generators: GeneratorRegistry
    weights: WeightScheduler = field(default_factory=WeightScheduler)
    background: list[Request] = field(default_factory=list)
    batches: int = 0
    tuning: BatchTuner | None = None
    limits: BatchLimits = field(init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.limits = self.settings.limits if self.tuning is None else self.tuning.limits

    @classmethod
    def create(cls, settings: SchedulerSettings) -> BatchScheduler:
        return cls(
            settings,
            RequestQueue(load_key(settings)),
            Router(settings.routing),
            SlotRegistry(),
            GeneratorRegistry(settings),
            tuning=BatchTuner.begin(settings) if settings.batching == "auto" else None,
        )

    # ------------------------------------------------------------ stations

    def add_slots(self, simulator: str, batches: tuple[EnvBatchInfo, ...]) -> None:
        """A simulator joined, with these env batches."""
        self.slots.join(simulator, batches)

    def remove_slots(self, simulator: str) -> None:
        """A simulator is gone, and with it what its slots asked."""
        for name in self.slots.leave(simulator):
            self._withdraw(name)
            self.router.forget_slot(name)
            if self.tuning is not None:
                self.tuning.remove_slot(name)

    def add_generator(self, event: GeneratorJoined) -> None:
        self.generators.join(GeneratorState(event.generator, event.incarnation, event.version))

    def remove_generator(self, name: str) -> list[RefuseRequest]:
        """Its batch returns to the queue with the old arrival times; requests bound to it go to any generator.

        Requests that it reported as answered return too if their slot has not been heard since: the answer may be lost
        with the generator, and a second one does no harm. The request of a slot that is not live is refused: its reply
        arrived before the generator was lost, or its rows were cancelled.
        """
        generator = self.generators.leave(name)
        if self.tuning is not None:
            self.tuning.remove_generator(name)
        self.queue.move_all(name, ANY)
        self.router.forget_generator(name)
        refusals = []
        for request, slot in (*self._unanswered(generator), *self._unconfirmed(name)):
            slot.answered_by = ""
            if slot.live:
                slot.request = request
                self._enqueue(request, slot)
            else:
                slot.request = None
                refusals.append(RefuseRequest(slot.simulator, slot.name, request.sequence, "its rows hold no tickets"))
        return refusals

    def note_live(self, name: str, *, live: bool) -> list[RefuseRequest]:
        """A slot became live, or stopped: a request that still waits for a slot without tickets is refused."""
        slot = self.slots.slots.get(name)
        if slot is None:
            return []
        self.slots.set_live(slot, live=live)
        request = None if live else self._withdraw(name)
        if request is None:
            return []
        slot.request = None
        return [RefuseRequest(slot.simulator, name, request.sequence, "its rows were cancelled")]

    # ------------------------------------------------------------ requests and passes

    def hear(self, event: RequestArrived, now: float) -> None:
        """A request arrived now."""
        slot = self.slots.slots[event.slot]
        if slot.request is not None:
            # Its reply arrived before its generator's report, or the generator died between the two: it is answered.
            assert slot.request.sequence < event.sequence, f"slot {slot.name} asked twice"
            self._withdraw(slot.name)
        request = Request(
            slot=event.slot,
            simulator=event.simulator,
            sequence=event.sequence,
            rows=event.rows,
            version=event.version,
            reply_to=event.reply_to,
            arrived=now,
            generator=slot.generator,
            evaluation=event.evaluation,
        )
        slot.request = slot.last_request = request
        slot.answered_by = ""
        if self.tuning is not None and not slot.reserved:
            self.tuning.on_request(request, now)
        self._enqueue(request, slot)

    def finish(self, generator: GeneratorState, now: float) -> list[BatchingChosen]:
        """The generator's pass is over and its replies are out; what `batching: auto` chose then, if it did."""
        answered = [slot for _, slot in self._unanswered(generator)]
        for slot in answered:
            slot.request, slot.answered_by = None, generator.name
        tuning = self.tuning
        if tuning is not None and generator.batch is not None and not generator.batch.pinned:
            tuning.on_pass_finished(generator.name, [slot.name for slot in answered], now, len(self.generators.live))
            self.limits = tuning.limits
        generator.batch = None
        self.generators.note_free(generator)
        choice = None if tuning is None else tuning.take_announcement()
        return [] if choice is None else [choice]

    def _enqueue(self, request: Request, slot: ServedSlot) -> None:
        if slot.reserved:
            self.background.append(request)
        else:
            self.queue.push(request, self.router.pool(request, slot.ordinal, self.generators.live))

    def _withdraw(self, slot: str) -> Request | None:
        """Take the slot's request out of its queue, if it waits there."""
        request = next((request for request in self.background if request.slot == slot), None)
        if request is None:
            return self.queue.remove(slot)
        self.background.remove(request)
        return request

    def _unanswered(self, generator: GeneratorState) -> list[tuple[Request, ServedSlot]]:
        """The requests of the pass under way whose slots still wait for them; others are gone or have gone on."""
        requests, slots = generator.batch.requests if generator.batch else (), self.slots.slots
        # Mostly it is the same object; after a resumption it is only equal.
        return [
            (request, slot)
            for request in requests
            if (slot := slots.get(request.slot)) is not None and (slot.request is request or slot.request == request)
        ]

    def _unconfirmed(self, generator: str) -> list[tuple[Request, ServedSlot]]:
        """The requests that this generator reported as answered, of slots that have not been heard since."""
        slots = self.slots.slots.values()
        return [(slot.last_request, slot) for slot in slots if slot.last_request and slot.answered_by == generator]

    # ------------------------------------------------------------ batches

    def due(self, now: float) -> list[Serve]:
        """Start every batch that is due. `evaluation_priority` says which goes first where an evaluator serves both."""
        if not self.background:
            return self._serve_training(now)
        if self._background_first(now):
            return [*self._serve_background(), *self._serve_training(now)]
        return [*self._serve_training(now), *self._serve_background()]

    def deadline(self, due_away: Sequence[str] = ()) -> float:
        """When the next batch of an idle generator becomes due by the clock; infinite if none waits.

        due_away: generators off their devices for which one is due already; of the others there it also says when."""
        idle, away = self.generators.idle, self.generators.away
        if not (idle or len(away) > len(due_away)) or not self.queue.orders or self.settings.batching == "lockstep":
            return float("inf")
        able = idle if not away else {name for name in (*idle, *away) if name not in due_away}
        _, _, oldest = self.queue.view([ANY, *(name for name in self.queue.bound if name in able)])
        return due_at(oldest, self.limits)

    def due_away(self, now: float) -> list[str]:
        """Generators for which a batch is due, but which are not on the devices that they lease."""
        away, waiting = self.generators.away, self.queue.orders
        if not away or not waiting:
            return []
        complete = len(waiting) == self.slots.live
        if self._is_due((ANY,), complete, now):
            return list(away)
        return [name for name in self.queue.bound if name in away and self._is_due((ANY, name), complete, now)]

    def _background_first(self, now: float) -> bool:
        """Whether evaluation goes before training. `last`: once it has waited for `evaluation_max_wait_s`."""
        priority, evaluator = self.settings.evaluation_priority, self.generators.evaluator
        if priority == "last":
            oldest = min(request.arrived for request in self.background)
            return now >= oldest + self.settings.evaluation_max_wait_s
        return priority == "first" or evaluator is None or not evaluator.was_pinned

    def _serve_training(self, now: float) -> list[Serve]:
        idle, waiting = self.generators.idle, self.queue.orders
        if not idle or not waiting:
            return []
        complete = len(waiting) == self.slots.live
        if self.settings.batching == "lockstep":
            return self._serve_all() if complete else []
        present = self.generators.present
        bound = [name for name in self.queue.bound if name in idle]
        started = [self._start_next(present[name], now) for name in bound if self._is_due((ANY, name), complete, now)]
        while idle and waiting and self._is_due((ANY,), complete, now):
            started.append(self._start_next(next_idle(present[name] for name in idle), now))
        return started

    def _serve_background(self) -> list[Serve]:
        evaluator = self.generators.evaluator
        if evaluator is None or evaluator.busy or evaluator.pinned < 0:
            return []
        requests, self.background = tuple(self.background), []
        return [self._start(evaluator, requests, pinned=True)]

    def _is_due(self, pools: tuple[str, ...], complete: bool, now: float) -> bool:
        return is_due(Waiting(*self.queue.view(pools), complete), self.limits, now)

    def _start_next(self, generator: GeneratorState, now: float) -> Serve:
        limits = self.limits
        serve = self._start(generator, self.queue.take((ANY, generator.name), limits.max_rows, limits.max_requests))
        if self.tuning is not None:
            self.tuning.on_pass_started(generator.name, serve.batch.requests, now)
        return serve

    def _serve_all(self) -> list[Serve]:
        """`lockstep`: all batches at once, when every live generator is idle."""
        generators = [self.generators.present[name] for name in self.generators.live]
        if len(self.generators.idle) < len(generators):
            return []
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
        self.generators.note_busy(generator)
        if not pinned:
            self.router.served(requests, generator.name)
        return Serve(generator.name, generator.batch)
