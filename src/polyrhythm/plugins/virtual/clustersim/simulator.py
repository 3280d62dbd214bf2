"""Simulates a simulator station: env batches whose rows reset, request, step and finish by cost models.

The cycle of a slot, with one unit of work (a reset or a step) on its thread at a time:

    StartRows ─▶ reset (the rows granted together, as one unit) ─▶ request ─▶ reply ─▶ step ─▶ request …

After a step the samples that ended are emitted first, then the remaining rows ask again at once; rows granted
meanwhile reset while the reply is computed and join the next request. A row whose segment is full is parked until
`StartRows(resume=True)`, which needs no reset.
"""

from __future__ import annotations

import random

from polyrhythm.plugins.virtual.clustersim.costs import FREE
from polyrhythm.plugins.virtual.clustersim.driver import ProtocolError, VirtualDriver
from polyrhythm.plugins.virtual.clustersim.hardware import Device
from polyrhythm.plugins.virtual.clustersim.measures import IN_BATCH, QUEUED, RESET, STEP, THREAD, TICKETS
from polyrhythm.plugins.virtual.clustersim.settings import SimulatorGroup
from polyrhythm.plugins.virtual.clustersim.slots import StepThread, VirtualEpisodes, VirtualRow, VirtualSlot
from polyrhythm.plugins.virtual.clustersim.station import VirtualStation
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import CancelRow, DropReason, EnvBatchInfo, Request, SimulatorJoined, YieldDevice
from polyrhythm.specs.hashing import mix

#: Units of work that a slot can have pending when the station is asked to leave its devices: a step and a reset.
_AT_HAND = 2


class VirtualSimulator(VirtualStation):
    """One incarnation of a simulator station."""

    def __init__(self, name: str, incarnation: int, driver: VirtualDriver, group: SimulatorGroup) -> None:
        super().__init__(name, incarnation, driver, group)
        self._group = group
        self._episodes = VirtualEpisodes(self, group)
        self._process = Device(self.clock, contention=group.contention) if group.contention else None
        self._leaving: list[YieldDevice] = []
        self._left = 0
        self._slots: dict[str, VirtualSlot] = {}
        self._batches = tuple(self._env_batch(index) for index in range(group.env_batches))
        self.capacity = group.env_batches * (1 if group.shared_thread else group.slots)

    def _env_batch(self, index: int) -> EnvBatchInfo:
        group, name = self._group, f"{self.name}/{index}"
        infos = tuple(records.SlotInfo(f"{name}/{i}", i * group.rows, group.rows) for i in range(group.slots))
        shared = StepThread()
        for info in infos:
            rows = [VirtualRow(info.first + row) for row in range(info.rows)]
            thread = shared if group.shared_thread else StepThread()
            times = random.Random() if group.times_by == "seed" else self.rng
            self._slots[info.slot] = VirtualSlot(info.slot, info.first, rows, thread, self.clock.now, times)
        return EnvBatchInfo(name, infos, group.reset_rows, reserved=index >= group.env_batches - group.reserved)

    def joined(self) -> SimulatorJoined:
        return SimulatorJoined(self.name, self.incarnation, self._batches, self.host)

    @property
    def active(self) -> int:
        return sum(bool(slot.running) for slot in self._slots.values())

    def flush(self) -> None:
        now = self.clock.now
        for slot in self._slots.values():
            self.measures.states["slots"][slot.state] += now - slot.since
            slot.since = now

    def close(self) -> None:
        super().close()
        if self._process is not None:
            self._process.forget(self)
        for slot in self._slots.values():
            if slot.outstanding and not slot.in_batch:
                self._queue(-1)

    # ------------------------------------------------------------ commands

    def obey(self, command: records.Command) -> None:
        if not self.alive:
            return
        if isinstance(command, records.StartRows):
            self._start_rows(self._slots[command.slot], command.grants)
        elif isinstance(command, CancelRow):
            self._cancel(self._slots[command.slot], (command.ticket, command.attempt))
        elif isinstance(command, records.RefuseRequest):
            slot = self._slots[command.slot]
            if slot.outstanding and slot.sequence == command.sequence:
                self._advance(slot)
                self._go_on(slot)
        else:
            raise ProtocolError(f"simulator {self.name} cannot obey {command!r}")

    def _start_rows(self, slot: VirtualSlot, grants: tuple[records.Grant, ...]) -> None:
        for grant in grants:
            row = slot.rows[grant.row - slot.first]
            if row.ticket is not None:
                raise ProtocolError(f"row {row.index} of {slot.name} gets {grant.ticket} but works on {row.ticket}")
            if grant.resume and not row.parked:
                raise ProtocolError(f"row {row.index} of {slot.name} cannot resume: it is not parked")
            row.take(grant.ticket)
            if self._group.sample is not FREE:
                slot.begun_s += self._group.sample.draw(slot.times)
            if grant.resume:
                slot.ready.append(row)
            else:
                self._episodes.begin(row, grant.ticket)
                slot.joining.append(row)
        self._go_on(slot)

    def _cancel(self, slot: VirtualSlot, attempt: tuple[int, int]) -> None:
        for row in slot.rows_of({attempt}):  # none if it ended while the command was under way
            if (slot.running == STEP and row in slot.active) or row in slot.resetting:
                slot.cancelled.add(attempt)
                continue
            slot.drop(row)
            slot.on_tickets()
            if not slot.active:
                slot.answer = -1
            self._episodes.fail(row, DropReason.CANCELLED)
            self._go_on(slot)

    # ------------------------------------------------------------ calls from generators

    def _open(self, request: Request) -> VirtualSlot | None:
        """The slot of this request, if it waits for its answer: not one of an older incarnation, or answered."""
        slot = self._slots.get(request.slot)
        return slot if self.alive and slot is not None and slot.outstanding == request.reply_to else None

    def taken(self, request: Request) -> None:
        """A generator took the request from the queue."""
        slot = self._open(request)
        if slot is not None and not slot.in_batch:
            slot.in_batch = True
            self._queue(-1)
            if slot.state == QUEUED:
                self._enter(slot, IN_BATCH)
            self.measures.requests_served += 1
            self.measures.waited += self.clock.now - request.arrived

    def tokens(self, request: Request) -> list[int]:
        """Tokens of the answer to each of its rows."""
        slot = self._open(request)
        lengths = [] if slot is None else [self._episodes.tokens(row) for row in slot.active]
        return lengths + [1] * (request.rows - len(lengths))  # rows that do not wait for the answer any more

    def returned(self, request: Request) -> None:
        """The request's generator died before it answered."""
        slot = self._open(request)
        if slot is not None and slot.in_batch:
            slot.in_batch = False
            self._queue(1)
            if slot.state == IN_BATCH:
                self._enter(slot, QUEUED)

    def answered(self, request: Request, version: int) -> None:
        """Accept the reply, computed by weights `version`."""
        if (slot := self._open(request)) is not None:
            self._advance(slot)
            if slot.active:
                slot.answer = version
            self._go_on(slot)

    def _advance(self, slot: VirtualSlot) -> None:
        if not slot.in_batch:
            self._queue(-1)
        slot.outstanding = ""
        slot.in_batch = False

    # ------------------------------------------------------------ work

    def _go_on(self, slot: VirtualSlot) -> None:
        """Start the slot's next action; called after every change."""
        if (slot.answer >= 0 or slot.joining) and self._may_begin():
            thread = slot.thread
            if not thread.busy:
                self._begin(slot)
            elif slot.running == "" and not slot.queued:
                slot.queued = True
                thread.queue.append(slot)
        if slot.running == "":
            self._request(slot)
            if slot.outstanding:
                self._enter(slot, IN_BATCH if slot.in_batch else QUEUED)
            else:
                self._enter(slot, THREAD if slot.queued or slot.answer >= 0 or slot.joining else TICKETS)

    def _begin(self, slot: VirtualSlot) -> None:
        """Start the slot's next work on its idle thread: the answered step, else resets."""
        if slot.answer >= 0:
            slot.running = STEP
            if self._group.episode_time is None:
                seconds = self._group.step.draw(slot.times, len(slot.active))
            else:
                seconds = max(row.pace for row in slot.active)
        else:
            slot.running = RESET
            slot.resetting, slot.joining = slot.joining, []
            if self._group.times_by == "seed":
                slot.times.seed(mix(*(row.seed for row in slot.rows)))
            seconds = self._group.reset.draw(slot.times, len(slot.resetting))
        seconds, slot.begun_s = seconds + slot.begun_s, 0.0
        self._left -= 1
        slot.thread.busy = True
        self._enter(slot, slot.running)
        self.meter.begin(self.clock.now)
        if self._process is not None and slot.running == STEP:
            self._process.begin(self, seconds, 1.0, self._end, slot)
        else:
            self.work(seconds, self._end, slot)

    def _end(self, slot: VirtualSlot) -> None:
        thread, unit = slot.thread, slot.running
        self.meter.end(self.clock.now)
        thread.busy = False
        slot.running = ""
        if unit == STEP:
            version, slot.answer = slot.answer, -1
            self._episodes.advance(slot, version)
        else:
            slot.ready.extend(slot.resetting)
            slot.resetting = []
        if slot.cancelled:  # their `CancelRow` came while the thread was busy
            for row in slot.rows_of(slot.cancelled):
                slot.drop(row)
                self._episodes.fail(row, DropReason.CANCELLED)
            slot.cancelled.clear()
            slot.on_tickets()
        self._request(slot)
        while thread.queue and not thread.busy:
            waiting = thread.queue.popleft()
            waiting.queued = False
            self._go_on(waiting)
        self._go_on(slot)
        self._leave_if_done()

    # ------------------------------------------------------------ leased devices

    def _may_begin(self) -> bool:
        """Whether a unit of work may begin. The station must be on its devices. When asked to leave, it finishes a
        bounded number of units, as generators on other devices may bring more."""
        return not self.leases or (self.on_all and (not self._leaving or self._left > 0))

    def on_devices(self) -> None:
        for slot in self._slots.values():
            self._go_on(slot)

    def leave_device(self, command: YieldDevice) -> None:
        if not self._leaving:
            self._left = _AT_HAND * len(self._slots)
        self._leaving.append(command)
        if len(self._leaving) == len(self.leases):
            self._leave_if_done()

    def _leave_if_done(self) -> None:
        """Leave the devices once no unit of work is under way, if the station was asked to leave all of them."""
        if len(self._leaving) == len(self.leases) > 0 and not any(slot.running for slot in self._slots.values()):
            commands, self._leaving = self._leaving, []
            for command in commands:
                self.switch(command)

    def _request(self, slot: VirtualSlot) -> None:
        """Send the next request, unless one is outstanding or an answer waits for its step."""
        if slot.outstanding or slot.answer >= 0:
            return
        if slot.ready:
            slot.active.extend(slot.ready)
            slot.ready.clear()
            slot.on_tickets()
        if not slot.active:
            return
        slot.sequence += 1
        reply_to = slot.outstanding = f"{slot.name}@{self.incarnation}#{slot.sequence}"
        self.measures.requests += 1
        self._queue(1)
        identity, rows = (self.name, self.incarnation, slot.name, slot.sequence), len(slot.active)
        self.emit(records.RequestArrived(*identity, rows, slot.version, reply_to, slot.evaluation))

    # ------------------------------------------------------------ measures

    def _enter(self, slot: VirtualSlot, state: str) -> None:
        if slot.state == state:
            return
        now, measures = self.clock.now, self.measures
        measures.states["slots"][slot.state] += now - slot.since
        if measures.span is not None and slot.state in (RESET, STEP) and now > slot.since:
            measures.span(slot.name, slot.state, slot.since, now)
        slot.state, slot.since = state, now

    def _queue(self, delta: int) -> None:
        self.measures.waiting.add(self.clock.now, delta)
