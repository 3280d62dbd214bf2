"""The live loop: hear an event, ask the conductor, send its commands.

    while not done:
        event    ← launcher.receive(until the conductor's deadline)   # or Wake, when the deadline passed
        commands ← conductor.handle(event, now)
        launcher.send(each command)                                   # those for stations

One wait, one owner. Everything that decides is in the conductor, everything that works is in a station.
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


#: Longest wait for an event, after which `RunLoop.stop` is asked again.
_PATIENCE_S = 0.5
#: A stop that takes longer says what it waits for.
_SAID_S = 1.0
#: So many events go before a deadline that has passed.
_MOST_LATE = 10_000
#: Files that are kept open while the loop runs.
_SPARE = 32

_FOR_THE_RUN = (
    *(records.SampleEvaluated, records.ScoreCounted, records.EvaluationDone, records.TargetReached),
    *(records.EpisodeSetAside, records.FilterExhausted, records.BatchingChosen, records.Halt),
)


class OrderlyHalt(RunHalted):
    """The conductor says that the run must not go on; it stands between two events and can be saved as it is."""


class Interrupted(Exception):
    """Someone asked the run to stop; it stands between two events."""


class RunLoop:
    """Drives one conductor and one launcher.

    observers: called in this order, with reports and with the decisions that they hear. stall_s: seconds without any
    event, report or unit of work, and without a deadline to wait for, after which the run is declared stuck. stop:
    asked between two events; true ends what the loop is at with `Interrupted`. trace: every decision, if `record`.
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
        self._record, self._stall_s = record, stall_s
        self._asked: deque[records.Event] = deque()
        self._inbox: list[records.Command] = []
        self._held: Callable[[records.Command], bool] = lambda _: False

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that watch, in the order in which they are called."""
        return self._observers.observers

    def add_observers(self, *observers: Observer) -> None:
        """Have these watch from now on, after those that do already."""
        self._observers.add(*observers)

    def remove_observers(self, *observers: Observer) -> None:
        """Have these watch no more."""
        self._observers.remove(*observers)

    def start(self) -> None:
        """Start all stations and let them join. A resumed run goes on at once, so observers are there before.

        A trainer that leases its device publishes its first weights once it is on it: that is waited for."""
        for event in self.launcher.start():
            self.submit(event)
        if self.conductor.settings.lease is not None:
            self._run(lambda _: False, lambda: self.conductor.versions.published >= 0)

    def submit(self, event: records.Event) -> None:
        """Give the conductor an operator's event, or a station's joining, now."""
        self._decide(event)

    def submit_later(self, event: records.Event) -> None:
        """The same, but after the decision under way: for observers."""
        self._asked.append(event)

    def train_until(self, version: int) -> None:
        """Go on until `version` versions are trained, published and applied."""
        self.submit(records.TrainUntil(version))
        self._run(lambda command: isinstance(command, records.TargetReached) and command.version >= version)

    def evaluate(self, name: str, episodes: Sequence[records.Episode]) -> list[records.SampleEvaluated]:
        """Run these episodes; their results in the order in which they finished."""
        results: list[records.SampleEvaluated] = []

        def done(command: records.Command) -> bool:
            if isinstance(command, records.SampleEvaluated) and command.name == name:
                results.append(command)
            return isinstance(command, records.EvaluationDone) and command.name == name

        self.submit(records.Evaluate(name, tuple(episodes)))
        self._run(done)
        return results

    def await_evaluation(self, name: str) -> None:
        """Go on until the evaluation that was asked for is done."""
        self._run(lambda command: isinstance(command, records.EvaluationDone) and command.name == name)

    def wind_down(self, seconds: float) -> bool:
        """Finish the update under way and save the trainer's state; False if that takes longer than `seconds`.

        Nothing new is started meanwhile: the commands that would are not sent, and what they were for counts as lost
        when the run is resumed. Of an update that lacks samples the trainer saves the state before it. If it has
        stepped by some mini-batches already, it saves the state after it, once the episodes that run have the rest.
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
            if self.conductor.deadline() <= self.clock():  # a station that holds a device which the trainer waits for
                self._decide(records.Wake())
            due = min(until, say_at, self.conductor.deadline())
            event = self.launcher.receive(max(0.0, due - self.clock()))
            if event is not None:
                self._decide(event)
            self._pass_reports()
            if self.clock() >= say_at:
                say_at = math.inf
                log.info("waiting for %s, %g s at most; another signal stops at once", self._last_work(), seconds)
            if asked and isinstance(event, records.Checkpointed) and event.updates >= update:
                return True
        return False

    def _last_work(self) -> str:
        """What a run that winds down waits for."""
        updates = self.conductor.updates
        what = "the update under way" if updates.is_complete else "the trainer's state to be saved"
        call = self.launcher.hosting.station(updates.trainer).current_call() if updates.trainer else "being started"
        return f"{what} (trainer: {call})" if call else what

    def _run(self, done: Callable[[records.Command], bool], reached: Callable[[], bool] = lambda: False) -> None:
        """Go on until a command to the run satisfies `done`, or the run has `reached` a state.

        Consumes: events. Waits for: the launcher's next event or the conductor's deadline. Unblocked by: either.
        Produces: commands to stations, decisions and reports to observers. Raises OrderlyHalt when the conductor gives
        up, or this process may open no more files; RunHalted when no station has worked for `stall_s`, nothing has come
        from one, and no timer is set; Interrupted when `stop` says so.
        """
        try:
            with ExitStack() as spare:  # closed on an error, so that the run can be saved
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
            # What came before a deadline goes first, however late we listen.
            event = self.launcher.receive(0.0) if due <= now and late < _MOST_LATE else None
            late = 0 if event is None else late + 1
            if event is None and due <= now:
                quiet_since = now if self._decide(records.Wake()) else quiet_since
                due, now = self.conductor.deadline(), self.clock()
            timer = now < due < math.inf
            if event is None:
                wait = max(0.0, due - now if timer else quiet_since + self._stall_s - now)
                event = self.launcher.receive(min(wait, _PATIENCE_S))
            if event is not None:
                self._decide(event)
            if self._pass_reports() or event is not None:
                quiet_since = self.clock()
            elif self.launcher.hosting.work_done != worked:
                quiet_since, worked = self.clock(), self.launcher.hosting.work_done
            elif not timer and self.clock() >= quiet_since + self._stall_s:
                raise RunHalted(describe_stall(self.conductor, self._stall_s, pending_work(self.launcher.hosting)))

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
            finished |= done(command)
        return finished

    def _decide(self, event: records.Event) -> bool:
        """Ask the conductor and do as it says; True if it says anything."""
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
    """One sentence. stall_s: seconds in which nothing happened; slots: what the stations have not finished."""
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
