"""A conductor around another one, whose operation it moves between two versions (`mover`).

To the inner conductor a move is `Conductor.operate`: generators that are absent for a while, admission that paces more
than it must, another size of micro-batches; to one of leases, that a device is free at once (`share_devices`). Every
guarantee allows for these, so moves change timing, and no guarantee.

Invariants: moves come before the commands of the event at which they take effect; the inner conductor's operation is
the mover's, unless the generators that are on were lost, and then from the next version on.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar

from polyrhythm.plugins.autobatch.timing import PassTimeModel
from polyrhythm.plugins.moves import mover, operation, search, timing
from polyrhythm.plugins.moves.mover import Mover
from polyrhythm.plugins.moves.operation import starting
from polyrhythm.plugins.moves.search import MoveJudge
from polyrhythm.plugins.moves.timing import RunTiming
from polyrhythm.scheduler import records
from polyrhythm.scheduler.conductor import SERVING_EVENTS, AnyConductor, Conductor
from polyrhythm.scheduler.records import Command, Event, MoveChosen

#: Classes of the saved state.
_SAVED = (
    *(mover.Mover, mover.MoveTrial, operation.Operation, search.MoveSearch, search.MoveForecast),
    *(timing.RunTiming, timing.RecentSeconds, timing.DeviceShare, timing.PieceOfWork, timing.SlotAbsence),
    *(timing.MeasuredTimes, timing.TimingPoint, PassTimeModel),
)


class MovingConductor:
    """A conductor around `outer`, which is `inner` or wraps it. judge: address of the class that begins forecasts, of
    which `own_judge` is one. chosen: the moves of this part of the run."""

    judge: ClassVar[str] = "polyrhythm.plugins.moves.judge:OperationJudge"

    def __init__(self, outer: AnyConductor, inner: Conductor, own_judge: MoveJudge) -> None:
        rules = inner.settings.moves
        assert rules is not None, "nothing is to be moved"
        self.outer, self.inner, self.settings, self._rules = outer, inner, inner.settings, rules
        timing = RunTiming(self.settings, rules, micro_batch=rules.micro_batch)
        self.mover = Mover(self.settings, rules, timing, starting(self.settings, rules))
        inner.updates.micro_batch = rules.micro_batch
        self.chosen: list[MoveChosen] = []
        self._judge = own_judge
        self._codec = inner.codec.extended(_SAVED)
        self._share_parts()

    def _share_parts(self) -> None:
        outer = self.outer
        self.versions, self.rollout, self.updates = outer.versions, outer.rollout, outer.updates
        self.serving, self.stations, self.ledger = outer.serving, outer.stations, outer.ledger

    def handle(self, event: Event, now: float) -> list[Command]:
        """As `Conductor.handle`, with the moves that begin or end here."""
        if self.stations.is_outdated(event):
            return self.outer.handle(event, now)
        mover = self.mover
        moves = self._move(event, now)
        commands = self.outer.handle(event, now)
        mover.timing.on_event(event, now)
        if type(event) not in SERVING_EVENTS:
            self._on_rare_event(event, commands, now)
        mover.timing.on_commands(commands, now)
        if mover.search is not None:
            mover.search.work(self._judge, now)
        return [*moves, *commands]

    def _move(self, event: Event, now: float) -> list[MoveChosen]:
        """The moves at this event, with which the inner conductor then handles it."""
        mover = self.mover
        if isinstance(event, records.Published):
            tuning = self.serving.tuning
            moves = mover.on_published(now, self.settings.limits if tuning is None else tuning.limits)
        elif isinstance(event, records.StationLost) and self._computer_fails(event):
            moves = mover.undo_lost(now, event.station, event.reason) or mover.undo_late(now)
        elif mover.trial is not None and type(event) not in SERVING_EVENTS:
            moves = mover.undo_late(now)
        else:
            return []
        generators, wanted = self.serving.generators, mover.operation
        in_force = generators.off, min(self.rollout.max_lag, self.settings.max_lag), self.updates.micro_batch
        able = {*generators.present} - {*wanted.off}
        if moves or (able and in_force != (wanted.off, wanted.max_lag, wanted.micro_batch)):
            self.inner.operate(wanted.off, wanted.max_lag, wanted.micro_batch)
            self.outer.share_devices(together=wanted.together)
            mover.timing.on_operation(wanted)
        self.chosen += moves
        return moves

    def _computer_fails(self, event: records.StationLost) -> bool:
        """Whether the trainer or a generator is lost by a fault."""
        if event.moves or not event.blame:
            return False
        return event.station == self.updates.trainer or event.station in self.serving.generators.present

    def _on_rare_event(self, event: Event, commands: list[Command], now: float) -> None:
        slots = self.rollout.rows.slots
        changes = [(name, bool(slots[name].tickets)) for name in self.inner.live_changes if name in slots]
        self.mover.timing.on_live_slots(changes, now)
        paused = isinstance(event, records.Evaluate) and not event.background
        ended = any(isinstance(command, records.EvaluationDone) for command in commands)
        if isinstance(event, records.StationLost) or paused or ended or self.rollout.evaluations.queue:
            self.mover.disturbed = True

    def deadline(self) -> float:
        return self.outer.deadline()

    def summary(self) -> dict[str, Any]:
        return {**self.outer.summary(), "moves": [asdict(move) for move in self.chosen]}

    def pending(self) -> list[str]:
        return self.outer.pending()

    def save(self) -> dict[str, Any]:
        return {**self.outer.save(), "moves": self._codec.encode(self.mover)}

    def load(self, data: dict[str, Any]) -> None:
        """As `Conductor.load`. A run that was saved without moves begins with its settings."""
        self.outer.load(data)
        self._share_parts()
        if "moves" in data:
            self.mover = self._codec.decode(data["moves"], {"settings": self.settings, "rules": self._rules})
        else:
            self.updates.micro_batch = self.mover.operation.micro_batch

    def share_devices(self, *, together: bool) -> None:
        self.outer.share_devices(together=together)

    def detach(self) -> None:
        self.outer.detach()
        self.mover.restart_clock()
        now = self.mover.operation
        self.updates.micro_batch = now.micro_batch
        self.outer.share_devices(together=now.together)
