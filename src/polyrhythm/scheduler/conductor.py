"""The conductor: events and the time in, commands out.

It joins the two halves of the scheduler, which do not know each other:

- tickets: `rollout` (rows, tickets, samples) and `updates` (what the trainer gets);
- serving: `serving` (requests, batches or streams, generators and the weights that they hold).

Both read `versions`, the numbers of the weights. What one half needs from the other passes through here: which slots
are live, whether training episodes run, whether an evaluation pins the weights.

Optional parts are passed in (a tuner of batch limits, the scoring of samples) or wrap this conductor
(`plugins/lease/conductor.py`); `polyrhythm.conductors` builds what the settings ask for. The conductor is
deterministic: the same events at the same times give the same commands.

Invariants after every event: the ledger balances; no due batch waits for an idle generator, and no first request for a
generator with places for it; an idle trainer has no complete update; no row waits while a ticket is due; both halves
agree on which slots are live.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, get_args

from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import state_codec
from polyrhythm.scheduler.inference.batches import BatchScheduler
from polyrhythm.scheduler.inference.generators import GeneratorRegistry, GeneratorState
from polyrhythm.scheduler.inference.requests import RequestQueue, load_key
from polyrhythm.scheduler.inference.routing import Router
from polyrhythm.scheduler.inference.serving import Tuner
from polyrhythm.scheduler.inference.streams import StreamScheduler
from polyrhythm.scheduler.records import JOINED, SENDERS, ApplyWeights, Command, DropReason, Event, Halt, TargetReached
from polyrhythm.scheduler.rollout.granting import grant, grant_background, reissue_lost
from polyrhythm.scheduler.rollout.reset_forecast import ResetForecast
from polyrhythm.scheduler.rollout.tickets import RolloutScheduler, SampleScoring
from polyrhythm.scheduler.samples.admission import Admission
from polyrhythm.scheduler.samples.buffer import SampleBuffer
from polyrhythm.scheduler.samples.groups import SampleLedger
from polyrhythm.scheduler.samples.limits import FaultLimit, ReturnFilter
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.scheduler.updates import UpdateScheduler
from polyrhythm.scheduler.versions import VersionLedger

#: Parts of the conductor that are saved.
_PARTS = ("versions", "rollout", "updates", "serving", "stations")
#: Events that change neither tickets nor weights: they can only cause batches.
SERVING_EVENTS: frozenset[type] = frozenset(get_args(records.ServingEvent))
#: Events after which any generator may have to take weights.
_WEIGHT_EVENTS = frozenset(
    {records.GeneratorJoined, records.StationLost, records.Published, records.WeightsApplied, records.WeightsOffered}
)

#: Events that an earlier incarnation may still send; joining is outdated only by a later incarnation.
_SENDER = {kind: name for kind, name in SENDERS.items() if kind not in JOINED}
#: The serving half, in either form.
Serving = BatchScheduler | StreamScheduler


@dataclass(slots=True)
class StationRegistry:
    """incarnations: present station → its incarnation; refused: number of events of earlier ones."""

    incarnations: dict[str, int] = field(default_factory=dict)
    refused: int = 0

    def is_outdated(self, event: Event) -> bool:
        """Whether the sender's incarnation is not present."""
        kind = type(event)
        if (sender := _SENDER.get(kind)) is not None:
            return self.incarnations.get(getattr(event, sender)) != event.incarnation  # type: ignore[union-attr]
        if kind in JOINED:
            present = self.incarnations.get(getattr(event, SENDERS[kind]), event.incarnation)  # type: ignore[union-attr]
            return event.incarnation < present  # type: ignore[union-attr]
        return False


class AnyConductor(Protocol):
    """Interface that a run needs: `Conductor`, or an optional part's wrapper."""

    settings: SchedulerSettings
    versions: VersionLedger
    rollout: RolloutScheduler
    updates: UpdateScheduler
    serving: Serving
    stations: StationRegistry
    ledger: SampleLedger

    def handle(self, event: Event, now: float) -> list[Command]: ...
    def deadline(self) -> float: ...
    def summary(self) -> dict[str, Any]: ...
    def pending(self) -> list[str]: ...
    def save(self) -> dict[str, Any]: ...
    def load(self, data: dict[str, Any]) -> None: ...
    def detach(self) -> None: ...
    def share_devices(self, *, together: bool) -> None:
        """Let stations that lease a device be on it at once, or in turn again."""


class Conductor:
    """Decides for one run. tuner: chooses the limits of `batching: auto`; scoring: of finished samples.

    announced: version of the last `TargetReached`; halted: it has returned `Halt` and starts no update and no training
    episode any more, but completes an update that is lent in part, so that it can be saved. live_changes: slots that
    became live or stopped at the last event outside `SERVING_EVENTS`, in order. operated: `operate` was called since.
    """

    def __init__(
        self, settings: SchedulerSettings, tuner: Tuner | None = None, scoring: SampleScoring | None = None
    ) -> None:
        assert (settings.batching == "auto") == (tuner is not None), "build it by polyrhythm.conductors"
        assert (settings.scoring is None) == (scoring is None), "build it by polyrhythm.conductors"
        self.settings = settings
        self.versions = VersionLedger(settings)
        parts = Admission(settings), SampleBuffer(settings), ReturnFilter(settings)
        self.rollout = RolloutScheduler(settings, scoring or SampleScoring(), *parts)
        self.ledger = self.rollout.ledger
        self.updates = UpdateScheduler(settings)
        serving = StreamScheduler if settings.batching == "streams" else BatchScheduler
        queue, router = RequestQueue(load_key(settings)), Router(settings.routing)
        self.serving: Serving = serving(settings, queue, router, GeneratorRegistry(settings), tuning=tuner)
        self.stations = StationRegistry()
        self.faults = FaultLimit(settings)
        self.forecast = ResetForecast()
        self.codec = state_codec().extended((*(tuner.saved if tuner else ()), *self.rollout.scoring.saved))
        self.live_changes: list[str] = []
        self.announced = 0
        self.halted = False
        self.operated = False

    # ------------------------------------------------------------ the two entry points

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply the event and return the commands that follow, in order."""
        if self.stations.is_outdated(event):
            self.stations.refused += 1
            return []
        kind = type(event)
        commands = _HANDLERS[kind](self, event, now) or []
        if kind not in SERVING_EVENTS:
            self.advance(event, commands, now)
        commands += self.serving.due(now)
        return commands

    def deadline(self) -> float:
        """Time at which a `Wake` is due if no event comes before; infinite if time alone changes nothing."""
        return min(self.serving.deadline(), self.rollout.next_expiry())

    # ------------------------------------------------------------ steps of `handle`, for a conductor around this one

    def apply(self, event: Event, now: float) -> list[Command]:
        """Apply an event that is not outdated, and return the commands that follow from it alone."""
        return _HANDLERS[type(event)](self, event, now) or []

    def advance(self, event: Event, commands: list[Command], now: float) -> None:
        """Add to `commands`, which follow from the event alone, all others that became possible, except batches."""
        self.halted = self.halted or any(isinstance(command, Halt) for command in commands)
        self.live_changes = []
        if self.operated:
            self.serving.release_off()
        changed, self.operated = self.operated or type(event) in _WEIGHT_EVENTS, False
        commands += self._advance(now, weights_changed=changed)

    def operate(self, off: tuple[str, ...], max_lag: float, micro_batch: int = 0) -> None:
        """Switch exactly these generators off, and grant new groups by this α, at most the setting's. Both take effect
        at the next event outside `SERVING_EVENTS`; until then the generators serve as before. micro_batch: of updates
        that begin from now on (`StartUpdate`)."""
        self.serving.generators.set_off(off)
        self.rollout.max_lag = min(max_lag, self.settings.max_lag)
        self.updates.micro_batch = micro_batch
        self._update_applied()
        self.operated = True

    def share_devices(self, *, together: bool) -> None:
        """Nothing: no station leases a device."""

    # ------------------------------------------------------------ what others read

    def summary(self) -> dict[str, Any]:
        """For a run's summary. groups: `RolloutScheduler.summary`; set_aside: the tasks and seeds, with the reason of
        their last failure; batching: the last choice of `auto`, if any."""
        tuning = self.serving.tuning
        chosen = {"batching": asdict(tuning.choice)} if tuning is not None and tuning.choice is not None else {}
        aside = self.rollout.background_quarantine.set_aside | self.rollout.quarantine.set_aside
        set_aside = [{"task": task, "seed": seed, "reason": reason.value} for (task, seed), reason in aside.items()]
        return {"groups": self.rollout.summary(), "set_aside": set_aside, **chosen}

    # ------------------------------------------------------------ saving

    def pending(self) -> list[str]:
        """Pending work of optional parts, for a stall report."""
        return self.rollout.scoring.pending()

    def save(self) -> dict[str, Any]:
        encode, scoring = self.codec.encode, self.rollout.scoring
        scored = {"scoring": encode(scoring)} if scoring.saved else {}
        return {**{name: encode(getattr(self, name)) for name in _PARTS}, **scored, "announced": self.announced}

    def load(self, data: dict[str, Any]) -> None:
        """Restore the state from `save`, under the same settings. ValueError: another version saved it."""
        if missing := [name for name in (*_PARTS, "announced") if name not in data]:
            raise ValueError(f"the saved conductor has no {missing[0]!r}: another version of this software saved it")
        scoring, rollout = self.rollout.scoring, dict(data["rollout"])
        scored = data.get("scoring", rollout.pop("scoring", None))  # before 0.2 it was a part of the rollout
        if scoring.saved and scored is not None:
            scoring = self.codec.decode(scored)
        given = {"settings": self.settings, "key": self.serving.queue.key, "scoring": scoring}
        for name in _PARTS:
            setattr(self, name, self.codec.decode(rollout if name == "rollout" else data[name], given))
        self.ledger, self.announced = self.rollout.ledger, data["announced"]
        moved = self.serving.generators.off or self.rollout.max_lag < math.inf or self.updates.micro_batch
        if self.settings.moves is None and moved:
            self.operate((), self.settings.max_lag)  # the run was saved with moves, and goes on without

    def detach(self) -> None:
        """Forget the stations, after a restore: the run continues with new ones.

        Running tickets are granted again without counting an attempt; lent samples return to the buffer; weights must
        be offered again. Evaluations are forgotten: the run requests them again.
        """
        self.announced, self.halted = 0, False  # the run requests its target again
        self.faults.forgive(self.ledger)
        simulators = []
        for station in self.stations.incarnations:
            if station == self.updates.trainer:
                self.updates.leave(self.rollout)
            elif self.serving.generators.find(station) is not None:
                self._remove_generator(station)
            elif not self.rollout.scoring.has(station):
                self.serving.remove_slots(station)  # streams for it are aborted with their generators
                simulators.append(station)
        self.stations.incarnations.clear()
        self.forecast = ResetForecast()
        self.rollout.detach(simulators)
        if self.serving.tuning is not None:
            self.serving.tuning.restart_clock()

    # ------------------------------------------------------------ deciding

    def _advance(self, now: float, *, weights_changed: bool) -> list[Command]:
        """All commands that may have become possible, except batches."""
        rollout, versions, evaluations = self.rollout, self.versions, self.rollout.evaluations
        commands: list[Command] = self._pass_on_live_slots()
        if halts := self.faults.check(rollout.ledger):
            commands += halts
            self.halted = True
        commands += rollout.finish_evaluations()
        if rollout.admission.spare:
            commands += rollout.drop_surplus(now)
        if weights_changed or versions.waiting:
            commands += self.serving.weights.apply_due(
                self.serving.generators,
                versions,
                changed=weights_changed,
                quiet=not rollout.ledger.running,
                pinned=evaluations.begun,
            )
        ready = versions.applied >= 0 and not versions.waiting and not rollout.ledger.running
        while ready and evaluations.current and not evaluations.begun:  # one whose episodes are all set aside ends here
            rollout.begin_evaluation()
            commands += rollout.finish_evaluations()
        if evaluations.background:
            commands += [*self._pin_weights(), *grant_background(rollout, now)]
        if versions.applied >= 0:
            training = not (versions.draining or evaluations.queue or self.halted)
            commands += grant(rollout, versions.applied, now, training=training)
        commands += rollout.scoring.start(rollout)
        if not self.halted or self.updates.in_training:
            commands += self.updates.start(versions, rollout)
        target = rollout.admission.target
        if self.announced < target <= min(versions.trained, versions.applied):
            self.announced = target
            commands.append(TargetReached(target))
        if rollout.rows.changed:
            self._pass_on_live_slots()
        return commands + self.forecast.changes(rollout, versions.applied)

    def _pass_on_live_slots(self) -> list[Command]:
        """Pass changes of live slots to serving, which refuses waiting requests of slots without tickets."""
        commands: list[Command] = []
        changes = self.rollout.rows.take_changes()
        for slot, live in changes:
            commands += self.serving.on_live_change(slot, live=live)
        self.live_changes += [slot for slot, _ in changes]
        return commands

    def _pin_weights(self) -> list[Command]:
        """Load the newest weights into the evaluator's second copy, for the next background evaluation."""
        evaluation, evaluator = self.rollout.evaluations.current_background, self.serving.generators.evaluator
        if evaluation is None or evaluation.version >= 0 or evaluator is None or evaluator.pinning:
            return []
        if self.versions.published < 0:
            return []
        evaluator.pinned, evaluator.pinning = -1, True
        return [ApplyWeights(evaluator.name, self.versions.published, pinned=True)]

    # ------------------------------------------------------------ stations

    def _remove_station(self, station: str, now: float, *, blame: bool = True) -> list[Command]:
        del self.stations.incarnations[station]
        if station == self.updates.trainer:
            self.updates.leave(self.rollout)
            return []
        if self.serving.generators.find(station) is not None:
            return self._remove_generator(station)
        if self.rollout.scoring.has(station):
            return self.rollout.scoring.lose(self.rollout, station, now, blame=blame)
        aborted = self.serving.remove_slots(station)
        self.forecast.leave(station)
        gone = self.rollout.rows.leave(station)
        return [*aborted, *self.rollout.requeue_slots(gone, DropReason.SIMULATOR_LOST, now, blame=blame)]

    def _remove_generator(self, name: str) -> list[Command]:
        """A generator is lost; if it was the evaluator, so is the background evaluation whose weights it held."""
        refusals = self.serving.remove_generator(name)
        self._update_applied()
        lost = self.rollout.evaluations.current_background if name == self.settings.evaluator else None
        given_up = self.rollout.end_early(lost) if lost is not None and lost.version >= 0 else []
        return [*refusals, *given_up]

    def _update_applied(self) -> None:
        present = self.serving.generators.present.values()
        self.versions.on_held(generator.version for generator in present if not generator.off)

    def _generator(self, name: str) -> GeneratorState:
        generator = self.serving.generators.find(name)
        assert generator is not None, f"{name} is present, but no generator"
        return generator

    def _add_station(self, station: str, incarnation: int, now: float) -> list[Command]:
        """A station joins; an earlier incarnation that was not reported lost is removed."""
        commands = self._remove_station(station, now) if station in self.stations.incarnations else []
        self.stations.incarnations[station] = incarnation
        return commands

    def _on_simulator(self, event: records.SimulatorJoined, now: float) -> list[Command]:
        commands = self._add_station(event.simulator, event.incarnation, now)
        self.rollout.rows.join(event.simulator, event.batches)
        self.forecast.join(event.simulator, event.batches)
        self.serving.slots.join(event.simulator, event.batches, event.host)
        return commands

    def _on_generator(self, event: records.GeneratorJoined, now: float) -> list[Command]:
        commands = self._add_station(event.generator, event.incarnation, now)
        self.serving.add_generator(event)
        self._update_applied()
        return commands

    def _on_trainer(self, event: records.TrainerJoined, now: float) -> list[Command]:
        commands = self._add_station(event.trainer, event.incarnation, now)
        if self.updates.trainer:
            commands += self._remove_station(self.updates.trainer, now)
        return commands + self.updates.join(event.trainer, event.updates, self.versions, self.rollout, now)

    def _on_scorer(self, event: records.ScorerJoined, now: float) -> list[Command]:
        commands = self._add_station(event.scorer, event.incarnation, now)
        self.rollout.scoring.join(event)
        return commands

    # ------------------------------------------------------------ serving

    def _on_batch_done(self, event: records.BatchDone, now: float) -> list[Command]:
        generator = self._generator(event.generator)
        assert isinstance(self.serving, BatchScheduler), "a pass of a generator that serves by streams"
        return [
            *self.serving.finish(generator, now),
            *self.serving.weights.apply_due_to(
                generator,
                self.serving.generators,
                self.versions,
                quiet=not self.rollout.ledger.running,
                pinned=self.rollout.evaluations.begun,
            ),
        ]

    def _on_stream_done(self, event: records.StreamDone, _now: float) -> list[Command]:
        assert isinstance(self.serving, StreamScheduler), "a stream of a generator that serves by passes"
        self.serving.end(self._generator(event.generator), event)
        return []

    def _on_applied(self, event: records.WeightsApplied, _now: float) -> list[Command]:
        generator, evaluations = self._generator(event.generator), self.rollout.evaluations
        if event.pinned:
            generator.pinned, generator.pinning = event.version, False
            if (evaluation := evaluations.current_background) is not None:
                evaluation.version = event.version
            return []
        generator.version, generator.applying = event.version, None
        overtaken = evaluations.begun and event.version > self.versions.applied
        self._update_applied()
        # A generator that was restarted took newer weights: no generator can answer with the pinned ones any more.
        return self.rollout.end_early(evaluations.queue[0]) if overtaken else []

    # ------------------------------------------------------------ tickets

    def _on_failed(self, event: records.SampleFailed, now: float) -> list[Command]:
        self.faults.on_failure(event)
        return self.rollout.fail(event, now)

    def _on_scoring_failed(self, event: records.ScoringFailed, now: float) -> list[Command]:
        self.faults.on_failure(event)
        return self.rollout.scoring.on_failure(self.rollout, event, now)

    def _on_target(self, event: records.TrainUntil, _now: float) -> list[Command]:
        self.rollout.admission.target = max(self.rollout.admission.target, event.version)
        return []


#: Event → what it does; the commands that follow from it alone, None for none.
_HANDLERS: dict[type, Callable[[Conductor, Any, float], list[Command] | None]] = {
    records.SimulatorJoined: Conductor._on_simulator,
    records.GeneratorJoined: Conductor._on_generator,
    records.TrainerJoined: Conductor._on_trainer,
    records.ScorerJoined: Conductor._on_scorer,
    records.StationLost: lambda self, event, now: self._remove_station(event.station, now, blame=event.blame),
    records.RequestArrived: lambda self, event, now: self.serving.on_request(event, now),
    records.BatchDone: Conductor._on_batch_done,
    records.StreamDone: Conductor._on_stream_done,
    records.SampleFinished: lambda self, event, now: self.rollout.finish(event, now),
    records.SampleFailed: Conductor._on_failed,
    records.SampleScored: lambda self, event, now: self.rollout.scoring.on_score(self.rollout, event, now),
    records.ScoringFailed: Conductor._on_scoring_failed,
    records.PayloadsLost: lambda self, event, _: reissue_lost(self.rollout, event.payload_ids),
    records.UpdateDone: lambda self, event, _: self.updates.finish(event, self.versions, self.rollout),
    records.Published: lambda self, event, _: self.versions.on_published(event.version),
    records.WeightsOffered: lambda self, event, _: self.versions.on_published(event.version),
    records.WeightsApplied: Conductor._on_applied,
    records.Checkpointed: lambda self, event, _: self.updates.on_checkpoint(event.updates),
    records.SaveRequested: lambda self, *_: [records.SaveTrainer(self.updates.trainer)] if self.updates.trainer else [],
    records.TrainUntil: Conductor._on_target,
    records.Evaluate: lambda self, event, _: self.rollout.add_evaluation(event),
    records.Wake: lambda self, _, now: self.rollout.expire(now),
    # An optional part's.
    records.DeviceTaken: lambda *_: [],
    records.DeviceYielded: lambda *_: [],
}
