"""The simulator station: one env batch. It resets rows, steps slots as soon as their actions arrive, and fails samples
when the environment raises. Its factory makes it from plain data. Imports neither torch nor transformers.

Invariant: an environment that steps or resets only whole batches is never stepped while a row has an observation that
it has not acted on, so a no-op never advances a running episode.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyrhythm.config.registry import resolve
from polyrhythm.envs.base import EnvBatch, EnvSettings, batch_traits
from polyrhythm.envs.mujoco import RUN_FOLDER
from polyrhythm.errors import RunHalted, first_line
from polyrhythm.runtime.factories import StationContext
from polyrhythm.runtime.memory.arena import FAR, Arena
from polyrhythm.runtime.messages import (
    OffloadStore,
    Order,
    Reply,
    Station,
    StationTraits,
    part_address,
    process_address,
)
from polyrhythm.runtime.spans import RESETTING, STEPPING, Span
from polyrhythm.runtime.transport.drops import UnfitMessage
from polyrhythm.scheduler import records
from polyrhythm.specs import EnvSpec
from polyrhythm.stations.simulator.chunk import EpisodeMetrics, stepper, whole_batch
from polyrhythm.stations.simulator.guard import EnvFault, GuardedEnv
from polyrhythm.stations.simulator.reset_ahead import ResetAhead
from polyrhythm.stations.simulator.rows import MakeBlock
from polyrhythm.stations.simulator.slot import Slot, SlotIdentity, StepSettings
from polyrhythm.stations.simulator.waits import DeferredSteps, Lanes

log = logging.getLogger(__name__)


class Simulator:
    """Simulator of one env batch. source: sender of its events; chunk_steps: number of chunk steps of active rows;
    make_block: as in `Recorder`. Raises ValueError for a setting that the environment does not support."""

    def __init__(
        self,
        source: SlotIdentity,
        info: records.EnvBatchInfo,
        env: EnvBatch,
        settings: StepSettings,
        arena: Arena,
        make_block: MakeBlock | None = None,
    ) -> None:
        settings.check(env.spec)
        self.name, self.incarnation = source.simulator, source.incarnation
        self.env, self.info = GuardedEnv(env), info
        self.ahead = env if isinstance(env, ResetAhead) else None
        metrics = EpisodeMetrics(env.spec.metrics, env.rows) if env.spec.metrics else None
        self.slots = {
            slot.slot: Slot(slot, self.env, settings, arena, source, metrics, make_block) for slot in info.slots
        }
        self.chunk_steps = 0
        self._whole = not env.spec.step_rows
        self._joint = self._whole or settings.join
        step = whole_batch(self.env) if self._whole else self.env.step
        self._step = metrics.wrap(step) if metrics else step
        self._together = len(info.slots) > 1 and (self._joint or not info.reset_rows)
        self._step_chunk = stepper(env.spec, settings.action_repeat)
        self._todo: deque[Slot] = deque()
        self._queued: set[str] = set()  # names of those in `_todo`
        self._deferred = DeferredSteps(self.env)
        self._lanes = Lanes()
        self._reset_slots: Sequence[Slot] = ()  # slots reset in the last unit, until `_reset_end`
        self._step_slots: Sequence[Slot] = ()  # slots stepped after that in the same unit
        self._reset_end = 0.0
        self._dropped: dict[str, Slot] = {}  # slots whose answer was dropped since the last `spans`

    @property
    def traits(self) -> StationTraits:
        return StationTraits(deliver=self.deliver, wait_beside=self._deferred.defer)

    def joined(self) -> records.SimulatorJoined:
        return records.SimulatorJoined(self.name, self.incarnation, (self.info,))

    def current_call(self) -> tuple[str, float]:
        """The current call of the environment, else the longest-deferred step."""
        since = self._deferred.since
        return self.env.doing if since is None or self.env.doing[0] else ("step", since)

    def pending_work(self) -> list[str]:
        return [slot.pending_work() for slot in self.slots.values() if slot.live or slot.pending]

    def statistics(self) -> dict[str, float]:
        """env_s: seconds inside the environment; env_steps: transitions; chunk_steps: summed over rows. With
        spare rows, resets by how they began: resets_ready, resets_waited, resets_in_place (`ResetAhead`)."""
        resets = {}
        if ahead := self.ahead:
            resets = {"resets_ready": ahead.ready, "resets_waited": ahead.waited, "resets_in_place": ahead.in_place}
        env_steps = sum(slot.env_steps for slot in self.slots.values())
        counts = resets | {"env_s": self.env.seconds, "env_steps": env_steps, "chunk_steps": self.chunk_steps}
        return {name: float(count) for name, count in counts.items()}

    def suspend(self, _store: OffloadStore) -> int:
        """Move the environment off the leased device, if it can leave it; returns the bytes freed."""
        return self.env.inner.suspend() if self.env.traits.leaves_device else 0

    def resume(self, _store: OffloadStore) -> None:
        if self.env.traits.leaves_device:
            self.env.inner.resume()

    def close(self) -> None:
        for slot in self.slots.values():
            slot.close()
        self.env.close()

    # ------------------------------------------------------------ messages

    def handle(self, command: Order) -> None:
        match command:
            case records.StartRows():
                self._start(self._slot(command.slot), command)
            case records.CancelRow():
                self._cancel(self._slot(command.slot), command)
            case records.RefuseRequest():
                slot = self._slot(command.slot)
                slot.refuse(command.sequence, command.reason)
                self._look_again(slot)
            case records.PrepareEpisodes():
                self._slot(command.slot)
                self._prepare(command)
            case _:
                raise UnfitMessage("misdirected", f"{type(command).__name__} is not for a simulator")

    def deliver(self, reply: Reply) -> None:
        """Deliver a generator's answer to its slot. UnfitMessage: it does not fit."""
        slot = self._slot(reply.slot)
        if slot.answer(reply):
            self._queue(slot)
        else:
            log.warning("slot %s: late answer to request %d ignored", reply.slot, reply.sequence)

    def _slot(self, name: str) -> Slot:
        slot = self.slots.get(name)
        if slot is None:
            raise UnfitMessage("misdirected", f"{self.name} has no slot {name!r}")
        return slot

    def _start(self, slot: Slot, start: records.StartRows) -> None:
        """Queue the granted rows. UnfitMessage: they cannot be started."""
        slot.check(start.grants)
        if not self.info.reset_rows and any(grant.resume for grant in start.grants):
            raise UnfitMessage("impossible", f"slot {slot.name}: a row cannot resume, its batch resets only as a whole")
        slot.pending += start.grants
        self._queue(slot)

    def _prepare(self, command: records.PrepareEpisodes) -> None:
        """Reset spare rows for these episodes. UnfitMessage: the rows or episodes do not exist."""
        if self.ahead is None:
            raise UnfitMessage("impossible", f"env batch {self.info.name} has no spare rows to reset ahead")
        if not all(0 <= task < len(self.env.spec.tasks) and 0 <= seed < FAR for task, seed in command.episodes):
            raise UnfitMessage("impossible", f"env batch {self.info.name} cannot prepare {command.episodes}")
        tickets = [p.ticket for slot in self.slots.values() for p in slot.pending if not p.resume]
        self.ahead.prepare(command.episodes, [(ticket.task, ticket.seed) for ticket in tickets])

    def _cancel(self, slot: Slot, command: records.CancelRow) -> None:
        begun = self._deferred.begun_rows(slot)
        if not slot.cancel(command.ticket, command.attempt):
            log.info("slot %s: ticket %d has ended, nothing to cancel", command.slot, command.ticket)
        if unwanted := begun - self._deferred.begun_rows(slot):
            self.env.drop_step(sorted(unwanted))
        self._look_again(slot)

    def _queue(self, slot: Slot) -> None:
        self._deferred.add_queued(slot)
        if slot.name not in self._queued:
            self._queued.add(slot.name)
            self._todo.append(slot)

    def _look_again(self, slot: Slot) -> None:
        """The slot has changed between two units: queue it, and all others if slots begin or step together."""
        self._lanes.mark_change(slot, time.monotonic())
        for other in self.slots.values() if self._together else (slot,):
            self._queue(other)

    # ------------------------------------------------------------ work

    def work(self) -> bool:
        """Do one unit: begin rows of a slot, or do one chunk step.

        Consumes: grants and answers. Waits for: asynchronous steps, unless they are deferred (`wait_beside`). Unblocked
        by: `handle` and `deliver`, and the end of asynchronous steps. Produces: `SampleFinished` and
        `SampleFailed`, always before the slot's next `RequestArrived`. After a step that ended samples the request is
        posted in the next unit, so that rows granted in between can join it.
        """
        self._reset_slots = self._step_slots = ()
        self._deferred.begin(self._on_begin_fault)
        if self._deferred.are_queued(self._queued) and self._work_through_queue():
            return True
        for slot in self._deferred.requeued():
            self._queue(slot)
        return self._work_through_queue()

    def _work_through_queue(self) -> bool:
        """Do a unit for the first queued slot that can; whether one was done. Slots before it leave the queue."""
        while self._todo:
            slot = self._todo.popleft()
            self._queued.remove(slot.name)
            if self._work_on(slot):
                self._lanes.begin_unit()
                return True
        return False

    def spans(self, begin: float, end: float) -> Iterator[Span]:
        """Spans of the last unit of work; call it before the slots change again.

        The unit's time is all resetting or stepping; it includes posting the request that follows. A request posted
        in a unit of its own counts as (short) stepping.
        """
        for slot in self._dropped.values():
            self._lanes.mark_change(slot, begin)
        self._dropped.clear()
        middle = begin if not self._reset_slots else self._reset_end if self._step_slots else end
        yield from self._lanes.close_unit(RESETTING, self._reset_slots, begin, middle)
        yield from self._lanes.close_unit(STEPPING, self._step_slots, middle, end)

    def _work_on(self, slot: Slot) -> bool:
        worked = bool(slot.pending) and self._begin(slot)
        if worked:
            self._reset_end = time.monotonic()
        if slot.answered:
            members = self._slots_to_step(slot)
            if members and self._deferred.must_wait(slot, members):
                return worked
            if members:
                self._step_slots = members
                ended = self._step_members(members)
                if self._together or ended or slot.pending:
                    for other in self.slots.values() if self._together else (slot,):
                        self._queue(other)
                else:  # the same rows continue
                    slot.post()
                return True
            if slot.answered:
                return worked
        if slot.live and not slot.has_request:
            slot.post()
            if not worked:
                self._step_slots = [slot]
            return True
        return worked

    # ------------------------------------------------------------ begin

    def _begin(self, slot: Slot) -> bool:
        """Reset and activate granted rows; False if that must wait for other rows. A batch that resets only as a whole
        begins once no row runs."""
        if not self.info.reset_rows:
            if any(other.live or other.has_request for other in self.slots.values()):
                return False
        elif self._whole and (slot.has_request or any(other.answered for other in self.slots.values())):
            return False
        parts: list[tuple[Slot, list[records.Grant]]] = []
        # One call for all slots that can begin, where a call costs as much for one row as for all.
        together = self._whole or not self.info.reset_rows
        for one in self.slots.values() if together else (slot,):
            if one is slot or not one.has_request:
                parts.append((one, sorted(one.pending, key=lambda grant: grant.row)))
                one.pending.clear()
        self._reset_slots = [one for one, starting in parts if starting]
        done = self._reset(parts)
        for one, starting in parts:
            self._join(one, [grant for grant in starting if done or grant.resume])
            if done and together and one is not slot:
                self._queue(one)
        return True

    def _reset(self, parts: Sequence[tuple[Slot, Sequence[records.Grant]]]) -> bool:
        """Reset the rows of new episodes; in a batch that resets only as a whole, a row without a ticket is reset too,
        then idles."""
        episodes = {} if self.info.reset_rows else dict.fromkeys(range(self.env.rows), (0, 0))
        fresh = [(slot, [grant for grant in starting if not grant.resume]) for slot, starting in parts]
        for _, starting in fresh:
            episodes |= {grant.row: (grant.ticket.task, grant.ticket.seed) for grant in starting}
        if not episodes:
            return True
        try:
            tasks, seeds = map(list, zip(*episodes.values(), strict=True))  # a tuple would index numpy's dimensions
            self.env.reset(list(episodes), tasks, seeds)
        except EnvFault as fault:
            log.exception("env batch %s: reset of rows %s failed", self.info.name, list(episodes))
            for slot, starting in fresh:
                slot.fail_grants(starting, fault.reason, str(fault), _in_call(fault, len(episodes)))
            return False
        return True

    def _join(self, slot: Slot, starting: Sequence[records.Grant]) -> None:
        """Activate the grants whose rows were reset; the others fail individually."""
        kept = []
        for grant in starting:
            fault = None if grant.resume else self.env.failed.pop(grant.row, None)
            if fault is None:
                kept.append(grant)
            else:
                level = logging.INFO if fault.refused else logging.ERROR
                log.log(level, "env batch %s: row %d: %s%s", self.info.name, grant.row, fault, fault.place)
                slot.fail_grants([grant], fault.reason, str(fault), fault.place)
        try:
            if kept:
                slot.begin(kept)
        except EnvFault as fault:
            log.exception("env batch %s: the first observation failed", self.info.name)
            rows = [slot.row(grant) for grant in kept]
            slot.fail(rows, records.DropReason.ENVIRONMENT_RAISED, str(fault), _in_call(fault, len(kept)))

    # ------------------------------------------------------------ step

    def _slots_to_step(self, slot: Slot) -> list[Slot]:
        """The slots to step now: this one, or all live ones once all are answered if the batch steps together."""
        others = list(self.slots.values()) if self._joint else [slot]
        if self._joint and not all(other.answered for other in others if other.live):
            return []
        members = []
        for other in others:
            if other.due_rows and other.answered:
                members.append(other)
            elif other.answered:
                other.drop_answer()
                self._dropped[other.name] = other
                self._queue(other)
        return members

    def _on_begin_fault(self, slot: Slot, fault: EnvFault) -> None:
        log.error("env batch %s: a step could not begin", self.info.name, exc_info=fault)
        slot.fail_request(records.DropReason.ENVIRONMENT_RAISED, str(fault), _in_call(fault, slot.due_rows))
        self._look_again(slot)

    def _step_members(self, members: Sequence[Slot]) -> bool:
        """Do one chunk step of these slots together; True if a sample ended or failed."""
        try:
            left = None
            if any(member.may_reach_limit for member in members):
                left = np.concatenate([member.steps_left() for member in members])
            rows, actions = members[0].due()
            if len(members) > 1:
                rows, actions = (np.concatenate(parts) for parts in zip(*map(Slot.due, members), strict=True))
            result = self._step_chunk(self._step, rows, actions, left)
            self.chunk_steps += len(rows)
            if len(members) == 1:
                return members[0].record(result)
            ended, first = False, 0
            for member in members:
                own = member.due_rows
                ended |= member.record(result.part(first, first + own))
                first += own
            return ended
        except EnvFault as fault:
            log.exception("env batch %s: a step failed", self.info.name)
            more = _in_call(fault, sum(member.due_rows for member in members))
            for member in members:
                if member.has_request:
                    member.fail_request(records.DropReason.ENVIRONMENT_RAISED, str(fault), more)
            return True


def _in_call(fault: EnvFault, rows: int) -> str:
    """Error detail for each row of a call that raised; the culprit row is unknown."""
    others = f", or another of the {rows} rows of that call" if rows > 1 else ""
    return f"{others}{fault.place}"


@dataclass(frozen=True, slots=True)
class SimulatorFactory:
    """A simulator from plain data. env: the environment's settings; spec: as reported to main. batches: its env batches
    of `rows` rows and their spares, one part each."""

    name: str
    env: dict[str, Any]
    spec: EnvSpec
    rows: int
    batches: tuple[records.EnvBatchInfo, ...]
    step: StepSettings

    def parts(self, context: StationContext, incarnation: int) -> Sequence[tuple[str, Callable[[], Station]]]:
        settings = resolve("env", self.env)
        assert isinstance(settings, EnvSettings), "checked before the start"
        if context.rendezvous is not None:  # a process of its own
            os.environ[RUN_FOLDER] = str(context.rendezvous.parent)

        def make(info: records.EnvBatchInfo, address: str) -> Station:
            with ExitStack() as undo:
                env = settings.build(self.rows + info.spares)
                undo.callback(env.close)
                refuse_other(env, self.spec, self.rows + info.spares)
                source = SlotIdentity(self.name, incarnation, address, context.channels.emit)
                batch = ResetAhead(env, info.spares) if info.spares else env
                station = Simulator(source, info, batch, self.step, context.arena, _block_maker(context, batch))
                undo.pop_all()
            return station

        process = process_address(self.name, incarnation)
        addresses = [part_address(process, part) for part in range(len(self.batches))]
        return [
            (address, lambda info=info, address=address: make(info, address))  # type: ignore[misc]
            for info, address in zip(self.batches, addresses, strict=True)
        ]

    def announcements(self, incarnation: int) -> Sequence[records.SimulatorJoined]:
        return [records.SimulatorJoined(self.name, incarnation, (info,)) for info in self.batches]


def _block_maker(context: StationContext, env: EnvBatch) -> MakeBlock | None:
    """Makes the memory of a slot's observations on the device, if the environment has them there. Not of a simulator
    that leases the device (`announced`): no generator is there with it, and torch keeps exported memory that nobody has
    opened."""
    seat = context.device_seat if batch_traits(env).observes_on_device and not context.announced else None
    if seat is None:
        return None
    from polyrhythm.runtime.memory.observed import ObservedBlock  # torch

    def make(info: records.SlotInfo) -> ObservedBlock | None:
        try:
            return ObservedBlock(seat, info.slot, info.rows, env.spec.observation)
        except RuntimeError as error:
            why = first_line(error)
            message = "observations of %s go through host memory: %s has no memory for them, or cannot share it (%s)"
            log.warning(message, info.slot, seat.name, why)
            return None

    return make


def refuse_other(env: EnvBatch, spec: EnvSpec, rows: int) -> None:
    """RunHalted: the batch differs from the expected spec or rows."""
    if env.rows != rows:
        raise RunHalted(f"env.build({rows}) gave rows = {env.rows}, it must be {rows}; correct the environment")
    for name, found, wanted in env.spec.differing(spec):
        where = f"the spec of env.build({rows})"
        raise RunHalted(f"{where} gave {name} = {found}, it must be {wanted}; correct the environment")
