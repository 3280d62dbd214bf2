"""Observers that measure a run's units of work, by the conductor's events.

    a pass    from `Serve`, or the end of the generator's previous pass, to `BatchDone`
    a step    from `BatchDone` to the slot's next request, without the steps of the slots before it in its env batch
    a round   in one process: from the end of a pass to that of the next one, without the trainer's work and idle time

A step includes the samples that begin with it: those that its env batch was granted since the step before. Where the
slot had to wait for them, it is not measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records

#: Most units that are taken together where there are enough, and how many groups that takes.
_GROUP, _GROUPS = 16, 20


@dataclass(slots=True)
class Unit:
    """Work that was measured. expected: seconds alone; trains: whether an update was under way when it began; samples:
    that began with it; count: of passes and steps."""

    seconds: float
    expected: float
    trains: bool = False
    samples: int = 0
    count: int = 1


class Longer(NamedTuple):
    """Seconds that a pass or a step takes longer than alone, and that a sample takes besides."""

    unit_s: float
    sample_s: float


def longer_than_alone(units: Sequence[Unit]) -> Longer:
    """The least-squares fit, scaled so that the sum is the measured one. units: in the order of their ends, which are
    taken in groups, as a reset may fall into the next unit."""
    rows = np.array([(unit.seconds - unit.expected, unit.count, unit.samples) for unit in units], float)
    size = max(1, min(_GROUP, len(units) // _GROUPS))
    seconds, *columns = np.add.reduceat(rows, np.arange(0, len(units), size)).T
    amounts = np.stack(columns, 1)
    total = max(0.0, float(seconds.sum()))
    found = np.maximum(np.linalg.lstsq(amounts, seconds, rcond=None)[0], 0.0)
    predicted = float((amounts @ found).sum())
    if not predicted:
        return Longer(total / amounts[:, 0].sum(), 0.0)
    unit_s, sample_s = (found * total / predicted).tolist()
    return Longer(unit_s, sample_s)


@dataclass(slots=True, eq=False)
class UnitTimer(Observer):
    """Measures passes and steps. step_s, pass_s, reset_s: seconds alone of so many rows (pass_s: None if passes are not
    measured); waited: seconds that do not count, so far; trainer_s: seconds that the trainer has worked, so far.

    updates: metrics of each, and `trainer_s` after it; update_s: seconds of each from command to report; published:
    seconds and transitions at each version; own_s: CPU seconds of this timer. All is from the first version on, once
    there is one.
    """

    hears: ClassVar[tuple[type, ...]] = (
        *(records.BatchDone, records.RequestArrived, records.Serve, records.StartRows, records.StartUpdate),
        *(records.UpdateDone, records.Published, records.SampleFinished, records.WeightsApplied, records.Wake),
    )

    step_s: Callable[[int], float]
    pass_s: Callable[[int], float] | None
    reset_s: Callable[[int], float] = lambda _: 0.0
    waited: Callable[[], float] = lambda: 0.0
    trainer_s: Callable[[], float] = lambda: 0.0
    rounds: Rounds | None = None
    passes: list[Unit] = field(default_factory=list)
    steps: list[Unit] = field(default_factory=list)
    updates: list[tuple[Mapping[str, float], float]] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    samples: list[records.SampleFinished] = field(default_factory=list)
    published: list[tuple[float, int]] = field(default_factory=list)
    transitions: int = 0
    own_s: float = 0.0
    _served: dict[int, tuple[float, records.Batch]] = field(default_factory=dict)
    _free: dict[str, float] = field(default_factory=dict)  # generator → end of its last pass
    _away: dict[str, tuple[float, int]] = field(default_factory=dict)  # slot → since, rows
    _stepped: dict[str, float] = field(default_factory=dict)  # env batch → end of its last step
    _granted: dict[str, tuple[int, float]] = field(default_factory=dict)  # env batch → samples, seconds of their resets
    _training: float | None = None  # since

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        began = time.thread_time()
        if self.rounds is not None:
            self.rounds.on_decision(now, event, commands)
        self._measure(now - self.waited(), event, commands)
        self.own_s += time.thread_time() - began

    def _measure(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        match event:
            case records.BatchDone():
                self._end_pass(now, event)
            case records.RequestArrived(slot=slot):
                self._end_step(now, slot)
            case records.UpdateDone() if self._training is not None:
                self.update_s.append(now - self._training)
                self._training = None
            case records.SampleFinished(ticket=ticket) if ticket >= 0:
                self.samples.append(event)
                self.transitions += event.env_steps
            case records.Published(version=version) if version > 0:
                if not self.published:
                    self._begin()
                self.published.append((now, self.transitions))
        self._send(now, event, commands)

    def _send(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        for command in commands:
            if isinstance(command, records.Serve):
                self._served[command.batch.number] = (now, command.batch)
            elif isinstance(command, records.StartRows):
                self._grant(command, waited=not isinstance(event, records.SampleFinished))
            elif isinstance(command, records.StartUpdate):
                self._training = now

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        if report.topic == "update":
            self.updates.append((report.values, self.trainer_s()))

    def _begin(self) -> None:
        """The first version: what was measured until now had to warm up."""
        for found in (self.passes, self.steps, self.update_s, self.samples):
            found.clear()
        del self.updates[:-1]
        if self.rounds is not None:
            self.rounds.found.clear()

    def _end_pass(self, now: float, event: records.BatchDone) -> None:
        served = self._served.pop(event.batch, None)
        if served is None:
            return
        begin, batch = max(served[0], self._free.get(event.generator, 0.0)), served[1]
        self._free[event.generator] = now
        if self.pass_s is not None:
            rows = sum(request.rows for request in batch.requests)
            self.passes.append(Unit(now - begin, self.pass_s(rows), self._training is not None))
        self._away |= {request.slot: (now, request.rows) for request in batch.requests}

    def _grant(self, command: records.StartRows, *, waited: bool) -> None:
        env_batch = _env_batch(command.slot)
        if waited:
            self._away.pop(command.slot, None)
        samples, seconds = self._granted.get(env_batch, (0, 0.0))
        self._granted[env_batch] = samples + len(command.grants), seconds + _resets(self.reset_s, command)

    def _end_step(self, now: float, slot: str) -> None:
        env_batch = _env_batch(slot)
        answered, samples, resets_s = self._away.pop(slot, None), *self._granted.pop(env_batch, (0, 0.0))
        if answered is not None:
            begin, expected = max(answered[0], self._stepped.get(env_batch, 0.0)), self.step_s(answered[1]) + resets_s
            self.steps.append(Unit(now - begin, expected, self._training is not None, samples))
        self._stepped[env_batch] = now

    @property
    def rate(self) -> float:
        """Transitions per second between the first and the last version, 0 if there are fewer than three."""
        if len(self.published) <= 2:
            return 0.0
        (begin, before), (end, after) = self.published[0], self.published[-1]
        return (after - before) / (end - begin)


@dataclass(slots=True, eq=False)
class Rounds:
    """Measures the rounds of one thread. apply_s: seconds alone until a version is loaded; busy: seconds that the
    trainer, and all stations, have worked so far; waited: seconds without a core, so far. A wait for a core counts for
    all that the thread did in the round."""

    step_s: Callable[[int], float]
    pass_s: Callable[[int], float]
    reset_s: Callable[[int], float]
    apply_s: float
    busy: Callable[[], tuple[float, float]]
    waited: Callable[[], float]
    found: list[Unit] = field(default_factory=list)
    trained_s: float = 0.0
    _slots: dict[int, Sequence[records.Request]] = field(default_factory=dict)  # pass → its requests
    _answered: dict[str, int] = field(default_factory=dict)  # slot → rows that step
    _since: tuple[float, float, float] | None = None  # seconds, waited, trained
    _last: tuple[float, float] = (0.0, 0.0)  # seconds, and all stations' work, at the last decision
    _idle: float = 0.0
    _unit: Unit = field(default_factory=lambda: Unit(0.0, 0.0, count=0))

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:
        trained, worked = self.busy()
        unit = self._unit
        match event:
            case records.Wake():  # at the batching's time limit: nothing was done meanwhile but what stations did
                self._idle += max(0.0, now - self._last[0] - (worked - self._last[1]))
            case records.RequestArrived(slot=slot) if slot in self._answered:
                unit.expected += self.step_s(self._answered.pop(slot))
                unit.count += 1
            case records.WeightsApplied():
                unit.expected += self.apply_s
            case records.BatchDone(batch=number) if number in self._slots:
                requests = self._slots.pop(number)
                self._answered |= {request.slot: request.rows for request in requests}
                unit.expected += self.pass_s(sum(request.rows for request in requests))
                unit.count += 1
                self._end(now, trained)
        for command in commands:
            if isinstance(command, records.Serve):
                self._slots[command.batch.number] = command.batch.requests
            elif isinstance(command, records.StartRows):
                self._unit.expected += _resets(self.reset_s, command)
                self._unit.samples += len(command.grants)
        self._last = (now, worked)

    def _end(self, now: float, trained: float) -> None:
        waited = self.waited()
        if self._since is not None:
            wall, without = now - self._since[0], waited - self._since[1]
            share = max(0.0, 1.0 - without / max(wall, 1e-9))
            self._unit.seconds = (wall - (trained - self._since[2]) - self._idle) * share
            self.trained_s += (trained - self._since[2]) * share
            self.found.append(self._unit)
        self._since, self._idle = (now, waited, trained), 0.0
        self._unit = Unit(0.0, 0.0, count=0)


def _resets(reset_s: Callable[[int], float], command: records.StartRows) -> float:
    fresh = sum(not grant.resume for grant in command.grants)
    return reset_s(fresh) if fresh else 0.0


def _env_batch(slot: str) -> str:
    return slot.rpartition("/")[0] or slot
