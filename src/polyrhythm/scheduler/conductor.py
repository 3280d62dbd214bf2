"""The conductor: events and the time in, commands out.

It composes the parts that decide: `rollout` (tickets, rows, admission, buffer, ledger), `dispatch` (requests and
batches), `versions` (weights) and `lending` (the trainer). It has no clock, no I/O, no threads; the same events
at the same times give the same commands, whoever drives it.

Invariants after every event: the ledger balances; an idle generator has no due batch; an idle trainer has no
complete update; no row asks while a ticket is due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from polyrhythm.scheduler.autobatch.candidates import Candidate
from polyrhythm.scheduler.autobatch.forecast import ClosedLoop, Forecast, ForecastLimits
from polyrhythm.scheduler.autobatch.rates import MeasuredRate, RateMeter
from polyrhythm.scheduler.autobatch.search import OperatingPoint, Search
from polyrhythm.scheduler.autobatch.timing import ClusterTiming, PassTimeModel, RunningPass, SlotTiming
from polyrhythm.scheduler.autobatch.tuning import BatchTuner
from polyrhythm.scheduler.codec import Codec
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.inference.requests import Key, Pool, RequestQueue, by_arrival
from polyrhythm.scheduler.inference.routing import Router
from polyrhythm.scheduler.inference.scheduler import BatchScheduler
from polyrhythm.scheduler.inference.versions import VersionLedger
from polyrhythm.scheduler.records import (
    CANCELLED,
    ApplyWeights,
    Batch,
    BatchDone,
    BatchingChosen,
    Checkpointed,
    Command,
    Evaluate,
    Event,
    GeneratorJoined,
    Halt,
    Published,
    RefuseRequest,
    Request,
    RequestArrived,
    SampleFailed,
    SampleFinished,
    SimulatorJoined,
    StationLost,
    TargetReached,
    Ticket,
    TrainerJoined,
    TrainUntil,
    UpdateDone,
    Wake,
    WeightsApplied,
    WeightsOffered,
)
from polyrhythm.scheduler.rollout.evaluation import EvaluationQueue, EvaluationState
from polyrhythm.scheduler.rollout.rows import EnvBatchState, IdleRows, RowRegistry, SlotState
from polyrhythm.scheduler.rollout.scheduler import RolloutScheduler
from polyrhythm.scheduler.rollout.sharding import load_function
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.filtering import ReturnFilter
from polyrhythm.scheduler.samples.groups import Group, Sample
from polyrhythm.scheduler.samples.ledger import SampleLedger, SampleState
from polyrhythm.scheduler.samples.selection import Lengths, SelectionStats
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.scheduler.updates import UpdateScheduler

#: All that a saved conductor is made of.
_CODEC = Codec(
    (
        *(
            Admission,
            IdleRows,
            Batch,
            BatchScheduler,
            EnvBatchState,
            EvaluationState,
            EvaluationQueue,
            GeneratorState,
            Group,
        ),
        *(
            UpdateScheduler,
            Lengths,
            Pool,
            Request,
            RequestQueue,
            ReturnFilter,
            RolloutScheduler,
            Router,
            RowRegistry,
            Sample,
            SampleBuffer,
        ),
        *(SampleLedger, SelectionStats, SlotState, SampleState, Ticket, VersionLedger),
        *(BatchTuner, BatchingChosen, Candidate, ClosedLoop, ClusterTiming, Forecast, ForecastLimits, MeasuredRate),
        *(OperatingPoint, PassTimeModel, RateMeter, RunningPass, Search, SlotTiming),
    )
)


class Conductor:
    """Decides for one run. `refused` counts events of stations that are no longer present; `forgiven` samples that an
    earlier part of the run dropped, which a run that was resumed does not halt for again; `halted`: it said `Halt`,
    and begins no update and no episode of training."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.settings = settings
        self.versions = VersionLedger(settings)
        self.rollout = RolloutScheduler(
            *(settings, RowRegistry(), Admission(settings), SampleBuffer(settings), SampleLedger(), EvaluationQueue()),
            ReturnFilter(settings),
        )
        tuning = BatchTuner.begin(settings) if settings.batching == "auto" else None
        queue = RequestQueue(_queue_key(settings))
        self.dispatch = BatchScheduler(settings, queue, Router(settings.routing), tuning=tuning)
        self.lending = UpdateScheduler(settings)
        self.incarnations: dict[str, int] = {}
        self.announced = 0
        self.refused = 0
        self.forgiven = 0
        self.halted = False
        self._last_failure = ""

    # ------------------------------------------------------------ the two entry points

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take note of the event and return what is to be done about it, in order."""
        if self._is_outdated(event):
            self.refused += 1
            return []
        commands = _HANDLERS[type(event)](self, event, now)
        self.halted = self.halted or any(isinstance(command, Halt) for command in commands)
        if type(event) not in _FLOW_EVENTS:
            commands += self._settle(now, weights=type(event) in _WEIGHT_EVENTS or self.versions.waiting)
        elif self.versions.waiting or (type(event) is BatchDone and event.generator not in self.dispatch.live):
            commands += self._apply_weights()
        commands += self.dispatch.serve(self.rollout.rows, now)
        return commands

    def deadline(self) -> float:
        """When a `Wake` is due if nothing happens before; infinite when time alone changes nothing."""
        return min(self.dispatch.deadline(), self.rollout.next_expiry())

    @property
    def ledger(self) -> SampleLedger:
        return self.rollout.ledger

    def choices(self) -> dict[str, Any]:
        """What filtering and redundancy made of the samples; empty where neither is on.

        kept_out_of_bounds: groups trained on although their mean return lies outside the filter's bounds.
        """
        settings, rollout = self.settings, self.rollout
        told: dict[str, Any] = {}
        if settings.filters:
            told["kept_out_of_bounds"] = rollout.filter.accepted
        if settings.extra_groups or settings.extra_members:
            told["selection"] = rollout.selection.as_dict()
        return told

    def told(self) -> dict[str, Any]:
        """For a run's summary. groups: `choices`; batching: what `auto` has chosen last, and why, where it has."""
        tuning = self.dispatch.tuning
        chosen = {"batching": asdict(tuning.choice)} if tuning is not None and tuning.choice is not None else {}
        return {"groups": self.choices(), **chosen}

    # ------------------------------------------------------------ saving

    def save(self) -> dict[str, Any]:
        """The whole state as JSON-able data."""
        parts = {name: _CODEC.encode(getattr(self, name)) for name in ("versions", "rollout", "dispatch", "lending")}
        return {**parts, "epochs": dict(self.incarnations), "announced": self.announced, "refused": self.refused}

    @classmethod
    def restore(cls, settings: SchedulerSettings, data: dict[str, Any]) -> Conductor:
        """The conductor that `save` described, under the same settings."""
        conductor = cls(settings)
        given = {"settings": settings, "key": conductor.dispatch.queue.key}
        for name in ("versions", "rollout", "dispatch", "lending"):
            setattr(conductor, name, _CODEC.decode(data[name], given))
        conductor.incarnations = dict(data["epochs"])
        conductor.announced, conductor.refused = data["announced"], data["refused"]
        return conductor

    def detach(self) -> None:
        """Forget the stations, after a restore: the run goes on with new ones.

        What ran goes out again, and the attempt is not held against it; what was lent waits in the buffer; weights
        have to be offered anew. Evaluations are forgotten: who waited for their results has to ask again.
        """
        gone: list[SlotState] = []
        self.announced, self.halted = 0, False  # whoever waits for the target asks again
        self.forgiven = self.ledger.dropped_by_faults
        self.rollout.forget_evaluations()
        for station, incarnation in list(self.incarnations.items()):
            if station == self.lending.trainer or self.dispatch.find(station):
                self._on_lost(StationLost(station, incarnation, "resumed"), 0.0)
            else:
                gone += self._remove_slots(station)
                del self.incarnations[station]
        commands = self.rollout.abandon(gone, "resumed", 0.0, blame=False)
        assert not commands, "resuming drops nothing"
        self.rollout.expiries.clear()
        if self.dispatch.tuning is not None:
            self.dispatch.tuning.restart_clock()
        self.rollout.cancelling.clear()

    # ------------------------------------------------------------ deciding

    def _settle(self, now: float, *, weights: bool) -> list[Command]:
        """Whatever may have become possible besides batches: weights, an evaluation, tickets, an update, the end."""
        rollout, versions = self.rollout, self.versions
        commands: list[Command] = self._refuse_quieted()
        if rollout.ledger.dropped_by_faults - self.forgiven > self.settings.max_dropped:
            commands.append(Halt(self._too_many_dropped()))
            self.halted = True
        commands += rollout.settle_evaluation()
        if rollout.admission.spare:
            commands += rollout.drop_surplus(now)
        if weights:
            commands += self._apply_weights()
        evaluations = rollout.evaluations
        ready = versions.applied >= 0 and not versions.waiting and not rollout.ledger.running
        if ready and evaluations.current and not evaluations.begun:
            rollout.begin_evaluation()
            commands += rollout.settle_evaluation()
        if evaluations.beside:
            commands += [*self._pin_weights(), *rollout.grant_aside(now)]
        if versions.applied >= 0:
            training = not (versions.draining or evaluations.queue or self.halted)
            commands += rollout.grant(versions.applied, now, training=training)
        if not self.halted:
            commands += self.lending.lend(versions, rollout)
        target = rollout.admission.target
        if self.announced < target <= min(versions.trained, versions.applied):
            self.announced = target
            commands.append(TargetReached(target))
        return commands

    def _too_many_dropped(self) -> str:
        """The settings, the most frequent reasons, and the last failure with its task and seed."""
        ledger, settings = self.ledger, self.settings
        reasons = sorted(ledger.dropped_for_faults().items(), key=lambda item: -item[1])
        counts = "; ".join(f"{count} x {reason}" for reason, count in reasons[:3])
        more = f"; {len(reasons) - 3} more reasons" if len(reasons) > 3 else ""
        last = f"; the last failure: {self._last_failure}" if self._last_failure else ""
        since, in_all = (" since the run was resumed", "in all ") if self.forgiven else ("", "")
        if self._last_failure.startswith("policy: "):
            fix = (
                "correct the policy, then resume the run; if its weights have diverged, begin another run with a lower "
                "learning rate (init_from takes an earlier checkpoint)"
            )
        else:
            fix = "correct what fails, then resume the run"
        return (
            f"rollout.max_dropped = {settings.max_dropped}: {ledger.dropped_by_faults - self.forgiven} samples were "
            f"dropped{since} after rollout.max_attempts = {settings.max_attempts} attempts each "
            f"({in_all}{counts}{more}){last}; {fix}"
        )

    def _apply_weights(self) -> list[Command]:
        generators = self.dispatch.generators.values()
        quiet = not self.rollout.ledger.running
        pinned = self.rollout.evaluations.begun
        due = self.versions.due(generators, quiet=quiet, pinned=pinned)
        version = self.versions.applied if pinned else self.versions.published
        for generator in due:
            generator.applying = version
        self.dispatch.note_weights(self.versions)
        return [ApplyWeights(generator.name, version) for generator in due]

    def _pin_weights(self) -> list[Command]:
        """The newest weights to the evaluator's copy, for the evaluation that comes next."""
        evaluation, evaluator = self.rollout.evaluations.aside, self.dispatch.evaluator
        if evaluation is None or evaluation.version >= 0 or evaluator is None or evaluator.pinning:
            return []
        if self.versions.published < 0:
            return []
        evaluator.pinned, evaluator.pinning = -1, True
        return [ApplyWeights(evaluator.name, self.versions.published, pinned=True)]

    def _refuse_quieted(self) -> list[Command]:
        """A slot whose rows were all cancelled may still have a request in the queue: tell it why not."""
        commands: list[Command] = []
        rows = self.rollout.rows
        for name in rows.quieted:
            slot = rows.slots.get(name)
            request = self.dispatch.remove(name) if slot is not None and not slot.tickets else None
            if slot is not None and request is not None:
                slot.request = None
                commands.append(RefuseRequest(slot.simulator, name, request.sequence, "its rows were cancelled"))
        rows.quieted.clear()
        return commands

    # ------------------------------------------------------------ noting

    def _is_outdated(self, event: Event) -> bool:
        name = _SENDER.get(type(event))
        if name is not None:
            return self.incarnations.get(getattr(event, name)) != event.incarnation  # type: ignore[union-attr]
        name = _NEWCOMER.get(type(event))
        return name is not None and event.incarnation < self.incarnations.get(getattr(event, name), event.incarnation)  # type: ignore[union-attr]

    def _present(self, station: str, incarnation: int, now: float) -> list[Command]:
        """A station joins; an earlier incarnation of it that was not reported lost is lost now."""
        commands: list[Command] = []
        if station in self.incarnations:
            commands = self._on_lost(StationLost(station, self.incarnations[station], "replaced"), now)
        self.incarnations[station] = incarnation
        return commands

    def _on_simulator(self, event: SimulatorJoined, now: float) -> list[Command]:
        commands = self._present(event.simulator, event.incarnation, now)
        self.rollout.rows.join(event.simulator, event.batches)
        return commands

    def _on_generator(self, event: GeneratorJoined, now: float) -> list[Command]:
        commands = self._present(event.generator, event.incarnation, now)
        self.dispatch.join(GeneratorState(event.generator, event.incarnation, event.version))
        self.versions.note_applied(self.dispatch.generators.values())
        return commands

    def _on_trainer(self, event: TrainerJoined, now: float) -> list[Command]:
        commands = self._present(event.trainer, event.incarnation, now)
        if self.lending.trainer:
            commands += self._on_lost(
                StationLost(self.lending.trainer, self.incarnations[self.lending.trainer], "replaced"), now
            )
        return commands + self.lending.join(event.trainer, event.updates, self.versions, self.rollout, now)

    def _on_lost(self, event: StationLost, now: float) -> list[Command]:
        del self.incarnations[event.station]
        if event.station == self.lending.trainer:
            self.lending.leave(self.rollout)
        elif self.dispatch.find(event.station):
            refusals = self.dispatch.leave(event.station, self.rollout.rows)
            self.versions.note_applied(self.dispatch.generators.values())
            lost = self.rollout.evaluations.aside if event.station == self.settings.evaluator else None
            given_up = self.rollout.give_up(lost) if lost is not None and lost.version >= 0 else []
            return [*refusals, *given_up]
        else:
            return self.rollout.abandon(self._remove_slots(event.station), "simulator lost", now)
        return []

    def _remove_slots(self, simulator: str) -> list[SlotState]:
        """The simulator's slots, which are gone with their requests."""
        gone = self.rollout.rows.leave(simulator)
        for slot in gone:
            self.dispatch.forget(slot.name)
        return gone

    def _on_request(self, event: RequestArrived, now: float) -> list[Command]:
        slot = self.rollout.rows.slots[event.slot]
        if slot.request is not None:
            # Its reply overtook its generator's report, or the generator died between the two: it is answered.
            assert slot.request.sequence < event.sequence, f"slot {slot.name} asked twice"
            self.dispatch.remove(slot.name)
        slot.request = Request(
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
        slot.asked, slot.answered_by = slot.request, ""
        self.dispatch.hear(slot.request, slot, now)
        return []

    def _on_batch_done(self, event: BatchDone, now: float) -> list[Command]:
        self.dispatch.finish(self._generator(event.generator), self.rollout.rows, now)
        return [*self.dispatch.announce()]

    def _generator(self, name: str) -> GeneratorState:
        generator = self.dispatch.find(name)
        assert generator is not None, f"{name} is present, but no generator"
        return generator

    def _on_finished(self, event: SampleFinished, now: float) -> list[Command]:
        return self.rollout.finish(event, now)

    def _on_failed(self, event: SampleFailed, now: float) -> list[Command]:
        if event.reason != CANCELLED:
            self._last_failure = f"{event.reason} ({event.detail})" if event.detail else event.reason
        return self.rollout.fail(event, now)

    def _on_update(self, event: UpdateDone, _now: float) -> list[Command]:
        assert self.lending.lent, f"update {event.update} is done, but nothing was lent"
        assert event.update == self.versions.updates, f"update {event.update} is done, {self.versions.updates} was due"
        stop: list[Command] = [Halt(event.halt)] if event.halt else []
        return self.lending.finish(self.versions, self.rollout) + stop

    def _on_published(self, event: Published, _now: float) -> list[Command]:
        self.versions.note_published(event.version)
        return []

    def _on_offered(self, event: WeightsOffered, _now: float) -> list[Command]:
        self.versions.note_published(event.version)
        return []

    def _on_applied(self, event: WeightsApplied, _now: float) -> list[Command]:
        generator = self._generator(event.generator)
        if event.pinned:
            generator.pinned, generator.pinning = event.version, False
            if (evaluation := self.rollout.evaluations.aside) is not None:
                evaluation.version = event.version
            return []
        generator.version, generator.applying = event.version, None
        evaluations = self.rollout.evaluations
        overtaken = evaluations.begun and event.version > self.versions.applied
        self.versions.note_applied(self.dispatch.generators.values())
        # A generator that came back found newer weights on the bus: nobody can answer with the pinned ones any more.
        return self.rollout.give_up(evaluations.queue[0]) if overtaken else []

    def _on_checkpoint(self, event: Checkpointed, _now: float) -> list[Command]:
        self.lending.note_checkpoint(event.updates)
        return []

    def _on_target(self, event: TrainUntil, _now: float) -> list[Command]:
        self.rollout.admission.target = max(self.rollout.admission.target, event.version)
        return []

    def _on_evaluate(self, event: Evaluate, _now: float) -> list[Command]:
        self.rollout.evaluations.ask(event.name, event.episodes, beside=event.beside)
        return []

    def _on_wake(self, _event: Wake, now: float) -> list[Command]:
        return self.rollout.expire(now)


_HANDLERS: dict[type, Callable[[Conductor, Any, float], list[Command]]] = {
    SimulatorJoined: Conductor._on_simulator,
    GeneratorJoined: Conductor._on_generator,
    TrainerJoined: Conductor._on_trainer,
    StationLost: Conductor._on_lost,
    RequestArrived: Conductor._on_request,
    BatchDone: Conductor._on_batch_done,
    SampleFinished: Conductor._on_finished,
    SampleFailed: Conductor._on_failed,
    UpdateDone: Conductor._on_update,
    Published: Conductor._on_published,
    WeightsApplied: Conductor._on_applied,
    Checkpointed: Conductor._on_checkpoint,
    WeightsOffered: Conductor._on_offered,
    TrainUntil: Conductor._on_target,
    Evaluate: Conductor._on_evaluate,
    Wake: Conductor._on_wake,
}


#: Events that change neither tickets nor weights: all that they can cause is a batch.
_FLOW_EVENTS = frozenset({RequestArrived, BatchDone})
#: Events after which generators may have to take weights, even if no version waits.
_WEIGHT_EVENTS = frozenset({GeneratorJoined, StationLost, Published, WeightsApplied, WeightsOffered})
#: Where an event names the station that sent it, for those that an earlier incarnation may still send.
_SENDER: dict[type, str] = {
    StationLost: "station",
    **dict.fromkeys((RequestArrived, SampleFinished, SampleFailed), "simulator"),
    **dict.fromkeys((BatchDone, WeightsApplied), "generator"),
    **dict.fromkeys((UpdateDone, Published, Checkpointed), "trainer"),
}
#: The same for joining, which only a later incarnation outdates.
_NEWCOMER: dict[type, str] = {SimulatorJoined: "simulator", GeneratorJoined: "generator", TrainerJoined: "trainer"}


def _queue_key(settings: SchedulerSettings) -> Key:
    return cast(Key, load_function(settings.queue_key, "queue_key")) if settings.queue_key else by_arrival
