"""Parts common to both forms of serving: slots, the request queue, generators that join and leave.

The conductor's contract with serving: `on_request`; `finish` a pass, or `end` a stream, that has answered requests;
then the commands that are `due`, and the time of the next ones (`deadline`). `BatchScheduler` serves by passes,
`StreamScheduler` by streams.

The rest of a slot's state (rows, tickets, parked episodes) is in `rollout/rows`. The conductor reports when a slot
becomes live (one of its rows holds a ticket) or stops being live.

Invariants: a request waits, is being served by exactly one generator, or is answered; a generator never serves a
request whose tickets are newer than its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.generators import GeneratorRegistry, GeneratorState, WeightScheduler
from polyrhythm.scheduler.inference.requests import ANY, RequestQueue
from polyrhythm.scheduler.inference.routing import Router
from polyrhythm.scheduler.records import AbortStream, BatchingChosen, EnvBatchInfo, RefuseRequest, Request
from polyrhythm.scheduler.settings import BatchLimits, SchedulerSettings


@dataclass(slots=True)
class ServedSlot:
    """ordinal: number of the slot for `routing: fixed`, -1 for a reserved one; generator: the only one that may serve
    it, if its sharding names one.

    request: waiting or in a batch; last_request: the last one received; answered_by: the generator that reported its
    answer, "" before that. host: of its observations. expected: the pool in which it counts as absent; None while it
    waits, is not live or is reserved.
    """

    name: str
    simulator: str
    ordinal: int
    generator: str | None
    reserved: bool = False
    live: bool = False
    request: Request | None = None
    last_request: Request | None = None
    answered_by: str = ""
    host: str = ""
    expected: str | None = field(default=None, init=False, metadata=UNSAVED)


@dataclass(slots=True)
class SlotRegistry:
    """Slots of all present simulators. live: number of the live ones that are not reserved for evaluation; ordinals:
    slot → its number, kept while its simulator is absent.

    absent: number of those live slots without a queued request, by the pool in which it is expected, positive only,
    kept by `BatchScheduler`; expected_among: the live generators for which they were
    counted, None if they must be recounted, as after a restore.
    """

    slots: dict[str, ServedSlot] = field(default_factory=dict)
    live: int = 0
    ordinals: dict[str, int] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict, init=False, metadata=UNSAVED)
    expected_among: list[str] | None = field(default=None, init=False, metadata=UNSAVED)

    def join(self, simulator: str, batches: tuple[EnvBatchInfo, ...], host: str = "") -> None:
        for batch in batches:
            for slot in batch.slots:
                ordinal = -1 if batch.reserved else self.ordinals.setdefault(slot.slot, len(self.ordinals))
                own = ServedSlot(slot.slot, simulator, ordinal, slot.generator, batch.reserved, host=host)
                self.slots[slot.slot] = own

    def leave(self, simulator: str) -> list[str]:
        """Remove the simulator's slots; returns their names."""
        gone = [slot for slot in self.slots.values() if slot.simulator == simulator]
        for slot in gone:
            self.live -= slot.live and not slot.reserved
            self.expect(slot, None)
            del self.slots[slot.name]
        return [slot.name for slot in gone]

    def set_live(self, slot: ServedSlot, *, live: bool) -> None:
        if not slot.reserved:
            self.live += live - slot.live
        slot.live = live

    def expect(self, slot: ServedSlot, pool: str | None) -> None:
        """The slot's next request is expected in `pool`; None: it is not expected."""
        before, slot.expected = slot.expected, pool
        if before == pool:
            return
        if before is not None:
            self.absent[before] -= 1
            if not self.absent[before]:
                del self.absent[before]
        if pool is not None:
            self.absent[pool] = self.absent.get(pool, 0) + 1


class Tuner(Protocol):
    """Chooses the batch limits of `batching: auto` from the requests and passes of training.

    saved: the dataclasses that its state consists of. limits: in force; they change only in `on_pass_finished`. choice:
    the last one, None before the first.
    """

    saved: ClassVar[tuple[type, ...]]
    limits: BatchLimits
    choice: BatchingChosen | None

    def on_request(self, request: Request, now: float) -> None: ...
    def on_pass_started(self, generator: str, requests: Sequence[Request], now: float) -> None: ...
    def on_pass_finished(self, generator: str, answered: Sequence[str], now: float, generators: int) -> None:
        """The generator's pass is over. answered: its slots, which no longer wait; generators: number that serve."""

    def remove_slot(self, slot: str) -> None: ...
    def remove_generator(self, generator: str) -> None: ...
    def restart_clock(self) -> None: ...

    def take_announcement(self) -> BatchingChosen | None:
        """The last choice; None if it was taken already."""


@dataclass(slots=True)
class RequestScheduler:
    """background: requests of reserved slots, oldest first; only the evaluator serves them, with its pinned weights.
    tuning: for `batching: auto`. Every queued request belongs to a live slot."""

    settings: SchedulerSettings = field(metadata=UNSAVED)
    queue: RequestQueue
    router: Router
    generators: GeneratorRegistry
    slots: SlotRegistry = field(default_factory=SlotRegistry)
    weights: WeightScheduler = field(default_factory=WeightScheduler)
    background: list[Request] = field(default_factory=list)
    tuning: Tuner | None = None

    def host_of(self, request: Request) -> str:
        return self.slots.slots[request.slot].host

    def remove_slots(self, simulator: str) -> list[AbortStream]:
        """Remove a lost simulator's slots and requests; aborts their streams."""
        for name in self.slots.leave(simulator):
            self._withdraw(name)
            self.router.forget_slot(name)
            if self.tuning is not None:
                self.tuning.remove_slot(name)
        return []

    def add_generator(self, event: records.GeneratorJoined) -> None:
        # The other rules measure single passes, start them together, or have none.
        depth = event.depth if self.settings.batching == "dynamic" else 1
        name, incarnation, version = event.generator, event.incarnation, event.version
        self.generators.join(GeneratorState(name, incarnation, version, host=event.host, depth=depth))

    def remove_generator(self, name: str) -> list[RefuseRequest]:
        """Requeue the requests of a lost generator with their old arrival times; its bound requests become common.

        Requests that it reported as answered return too if their slot has sent nothing since: the answer may be lost
        with the generator, and a second one does no harm. The request of a slot that is not live is refused: its reply
        arrived before the generator was lost, or its rows were cancelled.
        """
        generator = self.generators.leave(name)
        if self.tuning is not None:
            self.tuning.remove_generator(name)
        self.queue.move_all(name, ANY)
        self.router.forget_generator(name)
        self.slots.expected_among = None
        refusals = []
        unconfirmed = [
            (slot.last_request, slot)
            for slot in self.slots.slots.values()
            if slot.last_request and slot.answered_by == name
        ]
        for request, slot in (*self._unanswered(generator.requests), *unconfirmed):
            slot.answered_by = ""
            if slot.live:
                slot.request = request
                self._enqueue(request, slot)
            else:
                slot.request = None
                refusals.append(RefuseRequest(slot.simulator, slot.name, request.sequence, "its rows hold no tickets"))
        return refusals

    def release_off(self) -> None:
        """What waits for generators that are off becomes common; called before they stop being live."""
        for name in self.generators.off:
            self.queue.move_all(name, ANY)
            self.router.forget_generator(name)

    def on_live_change(self, name: str, *, live: bool) -> list[RefuseRequest | AbortStream]:
        """A slot became live or stopped; the waiting request of a slot without tickets is refused."""
        slot = self.slots.slots.get(name)
        if slot is None:
            return []
        self.slots.set_live(slot, live=live)
        request = None if live else self._withdraw(name)
        self._expect(slot)
        if request is None:
            return []
        slot.request = None
        return [RefuseRequest(slot.simulator, name, request.sequence, "its rows were cancelled")]

    def on_request(self, event: records.RequestArrived, now: float) -> None:
        slot = self.slots.slots[event.slot]
        if slot.request is not None:
            # Its reply arrived before its generator's report, or the generator died between the two: it is answered.
            assert slot.request.sequence < event.sequence, f"slot {slot.name} asked twice"
            self._withdraw(slot.name)
        # By position, in half the time: one of these per chunk step.
        simulator, _, name, sequence, rows, version, reply_to, evaluation = event
        request = Request(name, simulator, sequence, rows, version, reply_to, now, slot.generator, evaluation)
        slot.request = slot.last_request = request
        slot.answered_by = ""
        if self.tuning is not None and not slot.reserved:
            self.tuning.on_request(request, now)
        self._enqueue(request, slot)

    def _enqueue(self, request: Request, slot: ServedSlot) -> None:
        if slot.reserved:
            self.background.append(request)
        else:
            self.queue.push(request, self.router.pool(request, slot.ordinal, self.generators.live))
            self._expect(slot)

    def _expect(self, slot: ServedSlot) -> None:
        """Hook for `BatchScheduler`, which counts the slots that may still send requests. Called when the slot's
        request was queued or taken, or the slot became live or stopped."""

    def _withdraw(self, slot: str) -> Request | None:
        """Remove the slot's waiting request; None if none waits."""
        request = next((request for request in self.background if request.slot == slot), None)
        if request is None:
            return self.queue.remove(slot)
        self.background.remove(request)
        return request

    def _unanswered(self, requests: Sequence[Request]) -> list[tuple[Request, ServedSlot]]:
        slots = self.slots.slots
        # Mostly it is the same object; after a resumption it is only equal.
        return [
            (request, slot)
            for request in requests
            if (slot := slots.get(request.slot)) is not None and (slot.request is request or slot.request == request)
        ]
