"""A conductor of training alone, told the same events as the real one except those of background evaluations.

It must say the same, word for word: training's decisions are a function of training's events alone. A
generator with a second copy of the weights is, while it works for an evaluation, at a pass that training gave nobody.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tests.oracles.evaluation_audit import EvaluationAudit

from polyrhythm.conductors import restore_conductor
from polyrhythm.scheduler.conductor import AnyConductor
from polyrhythm.scheduler.inference.batches import BatchScheduler
from polyrhythm.scheduler.inference.generators import GeneratorState
from polyrhythm.scheduler.records import (
    ApplyWeights,
    Batch,
    BatchDone,
    CancelRow,
    Command,
    EpisodeSetAside,
    Evaluate,
    EvaluationDone,
    Event,
    GeneratorJoined,
    RefuseRequest,
    ReleasePayloads,
    RequestArrived,
    SampleEvaluated,
    SampleFailed,
    SampleFinished,
    Serve,
    SimulatorJoined,
    StartRows,
    StationLost,
    WeightsApplied,
)


@dataclass
class Turns(BatchScheduler):
    """taken: the pass that the evaluator begins with its pinned weights; first: before training could have its turn;
    awaited: the evaluator, while an evaluation waits for it, so that no batch of training is queued there."""

    taken: Batch | None = None
    first: bool = True
    awaited: str = ""

    def due(self, now: float) -> list[Serve]:
        if self.first:
            self._take()
        started = super().due(now)
        self._take()
        return started

    def _may_queue(self, generator: GeneratorState) -> bool:
        return generator.name != self.awaited

    def _take(self) -> None:
        if self.taken is None:
            return
        batch, self.taken = self.taken, None
        self.batches += 1
        generator = self.generators.present.get(batch.generator)
        if generator is not None:
            generator.batch = batch
            generator.served_rows += sum(request.rows for request in batch.requests)
            self.generators.refresh(generator)


class TrainingOnlyConductor:
    """Decides for training alone, in parallel with `conductor`, which must have no stations yet."""

    def __init__(self, conductor: AnyConductor, book: EvaluationAudit) -> None:
        assert not conductor.stations.incarnations, "the conductor has stations already"
        self._real, self._book = conductor, book
        self._apart = conductor.settings.evaluator if conductor.settings.evaluator_only else ""
        settings = replace(conductor.settings, evaluator="", evaluator_only=False)
        self._alone = restore_conductor(settings, json.loads(json.dumps(conductor.save())))
        saved = self._alone.serving
        self._turns = Turns(
            *(settings, saved.queue, saved.router, saved.generators, saved.slots),
            batches=saved.batches,
            tuning=saved.tuning,
        )
        self._alone.serving = self._turns

    def note(self, now: float, event: Event, commands: list[Command]) -> str:
        """What is wrong with this decision, in words, or nothing."""
        batches = [command.batch for command in commands if isinstance(command, Serve)]
        self._turns.taken = next((batch for batch in batches if batch.pinned), None)
        self._turns.first = bool(batches) and batches[0].pinned
        self._turns.awaited = self._real.settings.evaluator if self._real.serving.background else ""
        heard = self._of_training(event)
        alone = self._alone
        if heard is None:
            told: list[Command] = [*self._turns.due(now)]
        else:
            told = alone.handle(heard, now)
        alone.deadline()  # asked after every event, as it may tidy up
        alone.rollout.evaluations.tickets = self._real.rollout.evaluations.tickets
        said = [command for command in commands if not self._is_background(event, command)]
        return "" if said == told else f"training is told {said}; without background evaluations, it would be {told}"

    def _of_training(self, event: Event) -> Event | None:
        """The event as training alone would hear it; None for nothing."""
        background = False
        if isinstance(event, SimulatorJoined):
            return replace(event, batches=tuple(info for info in event.batches if not info.reserved))
        if isinstance(event, GeneratorJoined | BatchDone | WeightsApplied):
            background = event.generator == self._apart or (isinstance(event, WeightsApplied) and event.pinned)
        elif isinstance(event, StationLost):
            background = event.station == self._apart
        elif isinstance(event, Evaluate):
            background = event.background
        elif isinstance(event, RequestArrived):
            background = event.slot in self._book.reserved
        elif isinstance(event, SampleFinished | SampleFailed):
            background = event.ticket in self._book.tickets
        return None if background else event

    def _is_background(self, event: Event, command: Command) -> bool:
        """Whether the command is none that training hears of."""
        if isinstance(command, StartRows | CancelRow | RefuseRequest):
            return command.slot in self._book.reserved
        if isinstance(command, Serve):
            return command.batch.pinned
        if isinstance(command, ApplyWeights):
            return command.pinned
        if isinstance(command, EpisodeSetAside):
            return command.background
        if isinstance(command, SampleEvaluated | EvaluationDone):
            return command.name in self._book.background
        if isinstance(command, ReleasePayloads) and isinstance(event, SampleFinished):
            return event.ticket in self._book.tickets and command.payload_ids == (event.payload_id,)
        return False
