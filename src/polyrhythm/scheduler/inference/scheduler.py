"""Serving by passes: from waiting requests to batches, one forward pass each, by the batching rule.

Invariants: those of `serving`; an idle generator with a due batch never waits; weights wait for two passes at most,
as no batch is queued behind a pass while newer ones are published.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import Waiting, due_at, is_due, is_full, split_evenly
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.locality import deal
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.inference.routing import in_turn, next_idle
from polyrhythm.scheduler.inference.serving import RequestScheduler
from polyrhythm.scheduler.records import Batch, BatchingChosen, Request, Serve
from polyrhythm.scheduler.settings import BatchLimits


@dataclass(slots=True)
class BatchScheduler(RequestScheduler):
    """batches: numbers the batches; limits: those in force."""

    batches: int = 0
    limits: BatchLimits = field(init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.limits = self.settings.limits if self.tuning is None else self.tuning.limits

    # ------------------------------------------------------------ batches

    def finish(self, generator: GeneratorState, now: float) -> list[BatchingChosen]:
        """The generator's pass is over and its replies are out; what `batching: auto` chose then, if it did."""
        answered = [slot for _, slot in self._unanswered(generator.batch.requests if generator.batch else ())]
        for slot in answered:
            slot.request, slot.answered_by = None, generator.name
        tuning = self.tuning
        if tuning is not None and generator.batch is not None and not generator.batch.pinned:
            tuning.on_pass_finished(generator.name, [slot.name for slot in answered], now, len(self.generators.live))
            self.limits = tuning.limits
        generator.batch, generator.ahead, generator.began = generator.ahead, None, now
        self.generators.note(generator)
        choice = None if tuning is None else tuning.take_announcement()
        return [] if choice is None else [choice]

    def due(self, now: float) -> list[Serve]:
        """Start every batch that is due, and queue full ones behind passes. `evaluation_priority` says which goes first
        where an evaluator serves both."""
        if not self.background:
            started = self._serve_training(now)
        elif self._background_first(now):
            started = [*self._serve_background(now), *self._serve_training(now)]
        else:
            started = [*self._serve_training(now), *self._serve_background(now)]
        return started + self._serve_ahead(now) if self.generators.room else started

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
            return self._serve_all(now) if complete else []
        present = self.generators.present
        bound = [name for name in self.queue.bound if name in idle]
        started = [self._start_next(present[name], now) for name in bound if self._is_due((ANY, name), complete, now)]
        if not self.queue.bound and self.generators.several_hosts:
            return [*started, *self._serve_near(now, complete)]
        while idle and waiting and self._is_due((ANY,), complete, now):
            started.append(self._start_next(next_idle(present[name] for name in idle), now))
        return started

    def _serve_near(self, now: float, complete: bool) -> list[Serve]:
        """The batches that are due now, each on the requests' hosts as far as that costs no waiting (`locality`)."""
        limits, batches, idle = self.limits, list[tuple[Request, ...]](), self.generators.idle
        while len(batches) < len(idle) and self.queue.orders and self._is_due((ANY,), complete, now):
            batches.append(self.queue.take((ANY,), limits.max_rows, limits.max_requests))
        order = sorted((self.generators.present[name] for name in idle), key=in_turn)
        started = []
        for generator, requests in deal(batches, order, self.host_of) if batches else ():
            started.append(self._start_tuned(generator, requests, now))
        return started

    def _serve_ahead(self, now: float) -> list[Serve]:
        """Full batches for generators with room behind their passes: the pass that began first, first. What any
        generator may serve is left to one that is idle."""
        limits, common = self.limits, () if self.generators.idle else (ANY,)
        if not is_full(*self.queue.view((*common, *self.queue.bound))[:2], limits):
            return []
        started = []
        for generator in sorted(map(self.generators.present.__getitem__, self.generators.room), key=_by_begin):
            pools = (*common, generator.name)
            if is_full(*self.queue.view(pools)[:2], limits) and self._may_queue(generator):
                requests = self.queue.take(pools, limits.max_rows, limits.max_requests)
                started.append(self._start(generator, requests, now))
        return started

    def _may_queue(self, generator: GeneratorState) -> bool:
        """Whether no evaluation waits for the end of its pass."""
        return not self.background or generator is not self.generators.evaluator

    def _serve_background(self, now: float) -> list[Serve]:
        evaluator = self.generators.evaluator
        if evaluator is None or evaluator.busy or evaluator.pinned < 0:
            return []
        requests, self.background = tuple(self.background), []
        return [self._start(evaluator, requests, now, pinned=True)]

    def _is_due(self, pools: tuple[str, ...], complete: bool, now: float) -> bool:
        return is_due(Waiting(*self.queue.view(pools), complete), self.limits, now)

    def _start_next(self, generator: GeneratorState, now: float) -> Serve:
        limits = self.limits
        requests = self.queue.take((ANY, generator.name), limits.max_rows, limits.max_requests)
        return self._start_tuned(generator, requests, now)

    def _start_tuned(self, generator: GeneratorState, requests: tuple[Request, ...], now: float) -> Serve:
        serve = self._start(generator, requests, now)
        if self.tuning is not None:
            self.tuning.on_pass_started(generator.name, requests, now)
        return serve

    def _serve_all(self, now: float) -> list[Serve]:
        """`lockstep`: all batches at once, when every live generator is idle."""
        generators = [self.generators.present[name] for name in self.generators.live]
        if len(self.generators.idle) < len(generators):
            return []
        common = self.queue.take((ANY,), sys.maxsize, len(self.queue))
        shares = split_evenly(common, len(generators)) if common else [tuple[Request, ...]()] * len(generators)
        pairs = list(zip(generators, shares, strict=True))
        if not self.queue.bound and self.generators.several_hosts:
            pairs = deal(shares, generators, self.host_of)
        started = []
        for generator, share in pairs:
            own = self.queue.take((generator.name,), sys.maxsize, len(self.queue))
            if share or own:
                started.append(self._start(generator, share + own, now))
        return started

    def _start(
        self, generator: GeneratorState, requests: tuple[Request, ...], now: float, *, pinned: bool = False
    ) -> Serve:
        """The batch is the pass under way from now on, or waits behind it."""
        held = generator.pinned if pinned else generator.version
        for request in requests:
            assert request.version <= held, "weights older than a ticket"
            generator.served_rows += request.rows
        self.batches += 1
        batch = Batch(self.batches, generator.name, requests, pinned)
        if generator.batch is None:
            generator.batch, generator.began = batch, now
        else:
            generator.ahead = batch
        generator.was_pinned = pinned
        self.generators.note(generator)
        if not pinned:
            self.router.served(requests, generator.name)
        return Serve(generator.name, batch)


def _by_begin(generator: GeneratorState) -> tuple[float, str]:
    return generator.began, generator.name
