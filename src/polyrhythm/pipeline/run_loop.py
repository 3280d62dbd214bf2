"""The run loop: receive an event, let the conductor decide, send its commands.

    while not done:
        event    ← launcher.receive(until the conductor's deadline)   # or Wake, when the deadline passed
        commands ← conductor.handle(event, now)
        launcher.send(each command)                                   # those for stations

Only this loop waits for events. Decisions are made in the conductor, work is done in stations.
"""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from polyrhythm.errors import RunHalted
from polyrhythm.files import NO_DESCRIPTORS, trouble
from polyrhythm.pipeline.observers.base import Observer, ObserverTable
from polyrhythm.runtime.hosting import pending_work
from polyrhythm.runtime.launcher import Launcher
from polyrhythm.scheduler import records
from polyrhythm.scheduler.conductor import AnyConductor

log = logging.getLogger(__name__)


#: Longest wait for an event, and so between two calls of `RunLoop.stop`.
_PATIENCE_S = 0.5
#: Seconds after which a pending stop logs what it waits for.
_SAID_S = 1.0
#: Maximum number of events that are handled before an expired deadline.
_MOST_LATE = 10_000
#: Spare file descriptors that are held while the loop runs, and freed on an error.
_SPARE = 32

_FOR_THE_RUN = (
    *(records.SampleEvaluated, records.ScoreCounted, records.EvaluationDone, records.TargetReached),
    *(records.EpisodeSetAside, records.FilterExhausted, records.BatchingChosen, records.MoveChosen, records.Halt),
)


class OrderlyHalt(RunHalted):
    """The conductor ended the run, between two events; the run can be saved."""


class Interrupted(Exception):
    """A stop was requested; the run is between two events and can be saved."""


class RunLoop:
    """Drives one conductor and one launcher.

    observers: called in this order, with reports and with the decisions that they handle. stall_s: seconds without an
    event, report, unit of work or pending deadline after which the run counts as stuck. stop: called between two
    events; true ends the loop with `Interrupted`. trace: every decision, if `record`.
    """

    def __init__(
        self,
        conductor: AnyConductor,
        launcher: Launcher,
        clock: Callable[[], float],
        *,
        observers: Sequence[Observer] = (),
        stall_s: float = 60.0,
        record: bool = False,
    ) -> None:
        self.conductor, self.launcher, self.clock = conductor, launcher, clock
        self._observers = ObserverTable(observers)
        self.stop: Callable[[], bool] = lambda: False
        self.trace: list[records.Decision] = []
        self._record, self.stall_s = record, stall_s
        self._asked: deque[records.Event] = deque()
        self._inbox: list[records.Command] = []
        self._held: Callable[[records.Command], bool] = lambda _: False

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Observers in the order of their calls."""
        return self._observers.observers

    def add_observers(self, *observers: Observer) -> None:
        self._observers.add(*observers)

    def remove_observers(self, *observers: Observer) -> None:
        """Detach observers, and finish them in this order. All are finished, then the last error is raised."""
        self._observers.remove(*observers)
        with ExitStack() as finishing:
            for observer in reversed(observers):
                finishing.callback(observer.finish, self.clock())

    def start(self) -> None:
        """Start all stations and let them join. A resumed run continues at once, so attach observers before.

        Waits for the first weights of a trainer that leases its device, which it publishes once it is on the device.
        """
        for event in self.launcher.start():
            self.submit(event)
        if self.conductor.settings.lease is not None:
            self._run(lambda _: False, lambda: self.conductor.versions.published >= 0)

    def submit(self, event: records.Event) -> None:
        """Let the conductor handle an operator's event, or the joining of a station, now."""
        self._decide(event)

    def submit_later(self, event: records.Event) -> None:
        """Queue an event until the current decision is done, for observers."""
        self._asked.append(event)

    def train_until(self, version: int) -> None:
        """Run until `version` versions are trained, published and applied."""
        self.submit(records.TrainUntil(version))
        self._run(lambda command: isinstance(command, records.TargetReached) and command.version >= version)

    def evaluate(self, name: str, episodes: Sequence[records.Episode]) -> list[records.SampleEvaluated]:
        """Run these episodes and return their results in the order of completion."""
        results: list[records.SampleEvaluated] = []

        def done(command: records.Command) -> bool:
            if isinstance(command, records.SampleEvaluated) and command.name == name:
                results.append(command)
            return isinstance(command, records.EvaluationDone) and command.name == name

        self.submit(records.Evaluate(name, tuple(episodes)))
        self._run(done)
        return results

    def await_evaluation(self, name: str) -> None:
        """Run until the requested evaluation is done."""
        self._run(lambda command: isinstance(command, records.EvaluationDone) and command.name == name)

    def wind_down(self, seconds: float) -> bool:
        """Finish the current update and save the trainer's state; False if that takes longer than `seconds`.

        Commands that start new work are withheld, and their samples count as lost when the run is resumed. If the
        current update lacks samples, the trainer saves the state before it. If it has already trained on some
        mini-batches, running episodes supply the rest, and the trainer saves the state after it.
        """
        begin, updates = self.clock(), self.conductor.updates
        until, say_at = begin + seconds, begin + _SAID_S
        update = self.conductor.versions.updates + updates.is_complete
        following = self.conductor.versions.updates + bool(updates.in_training)
        self._held = lambda command: (
            isinstance(command, records.StartRows)
            or (isinstance(command, records.StartUpdate) and command.update >= following)
        )
        asked = False
        while self.clock() < until:
            if not asked and updates.trainer and self.conductor.versions.updates >= update:
                self._decide(records.SaveRequested())
                asked = True
            if self.conductor.deadline() <= self.clock():  # e.g. to free a device for the trainer
                self._decide(records.Wake())
            due = min(until, say_at, self.conductor.deadline())
            event = self.launcher.receive(max(0.0, due - self.clock()))
            if event is not None:
                self._decide(event)
            self._pass_reports()
            if self.clock() >= say_at:
                say_at = math.inf
                what = "the update under way" if updates.is_complete else "the trainer's state to be saved"
                trainer = updates.trainer
                call = self.launcher.hosting.station(trainer).current_call() if trainer else "being started"
                what += f" (trainer: {call})" if call else ""
                log.info("waiting for %s, %g s at most; another signal stops at once", what, seconds)
            if asked and isinstance(event, records.Checkpointed) and event.updates >= update:
                return True
        return False

    def _run(self, done: Callable[[records.Command], bool], reached: Callable[[], bool] = lambda: False) -> None:
        """Run until a command to the run satisfies `done`, or `reached` is true.

        Consumes: events. Waits for: the launcher's next event or the conductor's deadline. Unblocked by: either.
        Produces: commands to stations, decisions and reports to observers. OrderlyHalt: the conductor ends the run, or
        the process is out of file descriptors; RunHalted: no event, report or unit of work for `stall_s`, and no timer
        is set; Interrupted: `stop` is true.
        """
        try:
            with ExitStack() as spare:  # freed on an error, so that the run can be saved
                for _ in range(_SPARE):
                    spare.enter_context(Path(os.devnull).open())
                self._drive(done, reached)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            raise OrderlyHalt(f"the run cannot go on: {trouble(error)}") from error

    def _drive(self, done: Callable[[records.Command], bool], reached: Callable[[], bool]) -> None:
        quiet_since, worked, late = self.clock(), self.launcher.hosting.work_done, 0
        while not (reached() or self._finished(done)):
            if self.stop():
                raise Interrupted
            while self._asked:
                self._decide(self._asked.popleft())
            due, now = self.conductor.deadline(), self.clock()
            # Events that arrived before a deadline are handled first, however late this loop is.
            event = self.launcher.receive(0.0) if due <= now and late < _MOST_LATE else None
            late = 0 if event is None else late + 1
            if event is None and due <= now:
                quiet_since = now if self._decide(records.Wake()) else quiet_since
                due, now = self.conductor.deadline(), self.clock()
            timer = now < due < math.inf
            if event is None:
                wait = max(0.0, due - now if timer else quiet_since + self.stall_s - now)
                event = self.launcher.receive(min(wait, _PATIENCE_S))
            if event is not None:
                self._decide(event)
            if self._pass_reports() or event is not None:
                quiet_since = self.clock()
            elif self.launcher.hosting.work_done != worked:
                quiet_since, worked = self.clock(), self.launcher.hosting.work_done
            elif not timer and self.clock() >= quiet_since + self.stall_s:
                raise RunHalted(describe_stall(self.conductor, self.stall_s, pending_work(self.launcher.hosting)))

    def _finished(self, done: Callable[[records.Command], bool]) -> bool:
        if not self._inbox:
            return False
        commands, self._inbox = self._inbox, []
        finished = False
        for command in commands:
            if isinstance(command, records.Halt):
                raise OrderlyHalt(f"the run cannot go on: {command.reason}")
            if isinstance(command, records.FilterExhausted):
                log.warning("%d groups of one update were filtered; the others count as they are", command.filtered)
            if isinstance(command, records.BatchingChosen):
                wait = 1000.0 * command.max_wait_s
                said = "batches of up to %d requests (%d rows), waiting up to %.3g ms: %s"
                log.info(said, command.max_requests, command.max_rows, wait, command.reason)
            if isinstance(command, records.MoveChosen):
                log.info("move %s: %s: %s", command.outcome, command.move, command.reason)
            finished |= done(command)
        return finished

    def _decide(self, event: records.Event) -> bool:
        """Let the conductor handle an event, and carry out its commands; whether there are any."""
        now = self.clock()
        commands = self.conductor.handle(event, now)
        if self._record:
            self.trace.append(records.Decision(now, event, tuple(commands)))
        for command in commands:
            if isinstance(command, _FOR_THE_RUN):
                self._inbox.append(command)
            elif not self._held(command):
                self.launcher.send(command)
        self._observers.decide(now, event, commands)
        return bool(commands)

    def _pass_reports(self) -> bool:
        reports = self.launcher.hosting.reports()
        now = self.clock()
        for report in reports:
            self._observers.report(now, report)
        self._observers.tick(now)
        return bool(reports)


def describe_stall(conductor: AnyConductor, stall_s: float, slots: Sequence[str]) -> str:
    """One sentence on the state of a stuck run. stall_s: seconds without activity; slots: unfinished work of the
    stations."""
    generators = [
        f"{state.name} (weights {state.version}, {'busy' if state.busy else 'idle'})"
        for state in conductor.serving.generators.present.values()
    ]
    versions = conductor.versions
    parts = [
        f"nothing has happened for {stall_s:g} s",
        f"{len(conductor.serving.queue)} requests wait for generators {', '.join(generators) or '(none)'}",
        f"versions: trained {versions.trained}, published {versions.published}, applied {versions.applied}",
        f"trainer: {conductor.updates.trainer or 'none'}, {len(conductor.updates.in_training)} groups lent",
        f"samples: {conductor.ledger.as_dict()}",
        *_describe_evaluations(conductor),
        *conductor.pending(),
        f"slots: {'; '.join(slots) or 'none is live'}",
    ]
    return "; ".join(parts) + ". Please report this with the run folder"


def _describe_evaluations(conductor: AnyConductor) -> list[str]:
    evaluations, evaluator = conductor.rollout.evaluations, conductor.serving.generators.evaluator
    found = [
        f"evaluation {e.name}: {len(e.waiting)} episodes wait, {e.running} run"
        for e in (evaluations.current, evaluations.current_background)
        if e is not None
    ]
    if evaluations.current_background is not None:
        state = "is not there" if evaluator is None else f"has weights {evaluator.pinned} for it"
        waiting = len(conductor.serving.background)
        found.append(f"{conductor.settings.evaluator} {state}, {waiting} requests wait for it")
    return found
