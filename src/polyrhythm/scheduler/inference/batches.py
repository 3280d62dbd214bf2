"""Serving by passes: combines waiting requests into batches, one forward pass each, by the batching rule.

Invariants: those of `serving`; an idle generator with a due batch never waits; `slots.absent` is up to date; weights
wait for at most two passes, as no batch is queued behind a pass while newer ones are published.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import Waiting, due_from, is_due, is_full, split_evenly
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import ANY
from polyrhythm.scheduler.inference.routing import deal, in_turn, next_idle
from polyrhythm.scheduler.inference.serving import RequestScheduler, ServedSlot
from polyrhythm.scheduler.records import Batch, BatchingChosen, Request, Serve
from polyrhythm.scheduler.settings import BatchLimits


@dataclass(slots=True)
class BatchScheduler(RequestScheduler):
    """batches: counter that numbers the batches; limits: in force."""

    batches: int = 0
    limits: BatchLimits = field(init=False, metadata=UNSAVED)

    def __post_init__(self) -> None:
        self.limits = self.settings.limits if self.tuning is None else self.tuning.limits

    def finish(self, generator: GeneratorState, now: float) -> list[BatchingChosen]:
        """The generator's pass is over and its replies are sent; returns a new choice of `batching: auto`, if any."""
        answered = [slot for _, slot in self._unanswered(generator.batch.requests if generator.batch else ())]
        for slot in answered:
            slot.request, slot.answered_by = None, generator.name
        tuning = self.tuning
        if tuning is not None and generator.batch is not None and not generator.batch.pinned:
            tuning.on_pass_finished(generator.name, [slot.name for slot in answered], now, len(self.generators.live))
            self.limits = tuning.limits
        generator.batch, generator.ahead, generator.began = generator.ahead, None, now
        self.generators.refresh(generator)
        choice = None if tuning is None else tuning.take_announcement()
        return [] if choice is None else [choice]

    def due(self, now: float) -> list[Serve]:
        """Start every due batch, and queue full ones behind passes. `evaluation_priority` decides which goes first."""
        if (before := self.slots.expected_among) is not self.generators.live:
            self.slots.expected_among = self.generators.live
            for slot in self.slots.slots.values() if before != self.generators.live else ():
                self._expect(slot)  # O(slots), after the live generators changed
        if not self.background:
            started = self._serve_training(now)
        elif self._background_first(now):
            started = [*self._serve_background(now), *self._serve_training(now)]
        else:
            started = [*self._serve_training(now), *self._serve_background(now)]
        return started + self._serve_ahead(now) if self.generators.room else started

    def deadline(self, due_away: Sequence[str] = ()) -> float:
        """Time at which the next batch of an idle generator is due by the clock; infinite if none waits. due_away:
        generators off their devices that have a due batch already; those without one are included."""
        idle, away = self.generators.idle, self.generators.away
        if not (idle or len(away) > len(due_away)) or not self.queue.orders or self.settings.batching == "lockstep":
            return float("inf")
        able = idle if not away else {name for name in (*idle, *away) if name not in due_away}
        pools: list[tuple[str, ...]] = [(ANY, name) for name in self.queue.bound if name in able]
        views = map(self.queue.view, pools or [(ANY,)])
        return min(due_from(Waiting(*view, complete=False), self.limits) for view in views)

    def due_away(self, now: float) -> list[str]:
        """Generators with a due batch that are off their leased devices."""
        common = ANY not in self.slots.absent
        return [name for name in self.generators.away if self._is_due(name, common, now)] if self.queue.orders else []

    def _expect(self, slot: ServedSlot) -> None:
        pool = None
        if slot.live and not slot.reserved and slot.name not in self.queue.orders:
            pool = self.router.expected_pool(slot.name, slot.generator, slot.ordinal, self.slots.expected_among or ())
        self.slots.expect(slot, pool)

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
        if self.settings.batching == "lockstep":
            return self._serve_all(now) if len(waiting) == self.slots.live else []
        present = self.generators.present
        common = ANY not in self.slots.absent  # before any is taken: all batches due at the same instant start
        bound = [name for name in self.queue.bound if name in idle]
        started = [self._start_next(present[name], now) for name in bound if self._is_due(name, common, now)]
        if not self.queue.bound and self.generators.several_hosts:
            return [*started, *self._serve_near(common, now)]
        while free := self._free_for_common(common, now):
            started.append(self._start_next(next_idle(present[name] for name in free), now))
        return started

    def _free_for_common(self, common: bool, now: float) -> list[str]:
        """Idle generators with a due batch of requests that any generator may serve. common: all such slots wait."""
        idle, waiting = self.generators.idle, self.queue.view((ANY,))
        if not idle or not waiting[0]:
            return []
        if is_due(Waiting(*waiting, complete=False), self.limits, now):
            return list(idle)
        if not common or not self.limits.fire_when_all_wait:
            return []
        return [name for name in idle if name not in self.slots.absent]

    def _serve_near(self, common: bool, now: float) -> list[Serve]:
        """The batches due now, on their requests' hosts as far as that costs no waiting (`deal`)."""
        limits, batches, names = self.limits, list[tuple[Request, ...]](), list[str]()
        while len(batches) < len(free := self._free_for_common(common, now)):
            batches.append(self.queue.take((ANY,), limits.max_rows, limits.max_requests))
            names = free
        order = sorted((self.generators.present[name] for name in names), key=in_turn)
        dealt = deal(batches, order, self.host_of) if batches else []
        return [self._start_tuned(generator, requests, now) for generator, requests in dealt]

    def _serve_ahead(self, now: float) -> list[Serve]:
        """Full batches behind passes, the earliest first; what any generator may serve is left to an idle one."""
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
        """Whether no evaluation waits for the end of the generator's pass."""
        return not self.background or generator is not self.generators.evaluator

    def _serve_background(self, now: float) -> list[Serve]:
        evaluator = self.generators.evaluator
        if evaluator is None or evaluator.busy or evaluator.pinned < 0:
            return []
        requests, self.background = tuple(self.background), []
        return [self._start(evaluator, requests, now, pinned=True)]

    def _is_due(self, generator: str, common: bool, now: float) -> bool:
        """Whether a batch of its own and the common requests is due. common: all slots with common requests wait."""
        complete = common and generator not in self.slots.absent
        return is_due(Waiting(*self.queue.view((ANY, generator)), complete), self.limits, now)

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
        """Make the batch the generator's current pass, or queue it behind that."""
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
        self.generators.refresh(generator)
        if not pinned:
            self.router.served(requests, generator.name)
            for request in requests:
                self._expect(self.slots.slots[request.slot])
        return Serve(generator.name, batch)


def _by_begin(generator: GeneratorState) -> tuple[float, str]:
    return generator.began, generator.name
