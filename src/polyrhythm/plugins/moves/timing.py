"""Measured times of a run's stations, from the events and commands at its conductor.

All are seconds on the conductor's clock, from command to report, so message latency is in them. Two things are taken
out, because they depend on the operation and not on the station. Passes and updates that run at the same time on one
device are counted as if each had its share of it (processor sharing), so a time is what its work takes alone. A slot's
absence does not contain its waits for tickets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean, median

from polyrhythm.plugins.autobatch.timing import PassTimeModel
from polyrhythm.plugins.moves.operation import Operation
from polyrhythm.scheduler import records
from polyrhythm.scheduler.codec import UNSAVED
from polyrhythm.scheduler.inference.batching import padded
from polyrhythm.scheduler.records import Command, EnvBatchInfo, Event, Request
from polyrhythm.scheduler.settings import MoveRules, SchedulerSettings

TRAINER = "trainer"
#: Values kept: of single events of a version, and of the many events of one.
FEW_KEPT, MANY_KEPT = 5, 128
#: Passes of a generator from which its times count.
MIN_PASSES = 8
#: Part of an update that is taken not to depend on the size of its micro-batches, but on their number, as long as only
#: one size was measured.
FIXED = 0.2


@dataclass(slots=True)
class RecentSeconds:
    """The last `kept` values, oldest first."""

    kept: int = FEW_KEPT
    values: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        self.values.append(value)
        del self.values[: -self.kept]

    @property
    def middle(self) -> float:
        """The median: one hang of the machine does not count."""
        return median(self.values) if self.values else 0.0


@dataclass(slots=True)
class DeviceShare:
    """A device whose `running` pieces of work share it. work: seconds of work that one piece could do until `since`."""

    running: int = 0
    work: float = 0.0
    since: float = 0.0

    def advance(self, now: float, change: int) -> float:
        """Account until `now`, then add `change` pieces; returns `work`."""
        self.work += (now - self.since) / max(1, self.running)
        self.since = now
        self.running += change
        return self.work


@dataclass(slots=True)
class PieceOfWork:
    """A pass or an update under way. began: time; work: of each of its devices at that time. rows, slots: of a pass.
    counted: its time is that of the present operation."""

    began: float
    work: list[float]
    rows: int = 0
    slots: tuple[str, ...] = ()
    counted: bool = True


@dataclass(slots=True)
class SlotAbsence:
    """A slot between an answer and its next request. seconds: of this absence until `since`; since: time from which it
    counts on, below 0 while the slot has no tickets. in_pass: a pass answers it, so that its report may be late."""

    seconds: float = 0.0
    since: float = -1.0
    in_pass: bool = False
    away: bool = False


@dataclass(frozen=True, slots=True)
class TimingPoint:
    """Conditions under which rates are comparable: seconds of a pass of `rows` rows, of an absence and of an update."""

    rows: float = 0.0
    pass_s: float = 0.0
    absence_s: float = 0.0
    update_s: float = 0.0

    def updated(self, new: TimingPoint) -> TimingPoint:
        """With the times of `new` that are known."""
        return TimingPoint(*(after or before for after, before in zip(astuple(new), astuple(self), strict=True)))


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Times of the present: what a forecast needs.

    simulators: (slots, rows of a slot, an env batch's number of slots) of each; absences: of each one's slots. steps:
    chunk steps of samples. generators: name → depth. A pass of n rows takes base_s + per_row_s · n. switches: seconds
    to take or yield a device, by station. updates: seconds of an update by chunk steps of its micro-batches (0: the
    recipe's), where measured; micro_batch: the present ones. version_s: between two versions; events: of the conductor
    in one.
    """

    simulators: dict[str, tuple[int, int, int]]
    absences: dict[str, tuple[float, ...]]
    steps: tuple[float, ...]
    generators: dict[str, int]
    base_s: float
    per_row_s: float
    apply_s: float
    updates: dict[int, float]
    publish_s: float
    switches: dict[str, float]
    micro_batch: int = 0
    version_s: float = 0.0
    events: int = 0

    @property
    def update_s(self) -> float:
        """Seconds of an update as they are now."""
        return self.updates[self.micro_batch]

    def update_with(self, micro_batch: int) -> float:
        """Seconds of an update with micro-batches of this size: as measured, else on the line in 1/size through the
        two nearest measured sizes; with one measured, FIXED of it goes with the number of passes. At least half of the
        fastest measured one."""
        if micro_batch in self.updates:
            return self.updates[micro_batch]
        near = sorted(self.updates, key=lambda size: abs(1.0 / size - 1.0 / micro_batch))[:2]
        one = self.updates[near[0]]
        if len(near) > 1:
            by_number = (self.updates[near[1]] - one) / (1.0 / near[1] - 1.0 / near[0])
        else:
            by_number = FIXED * one * near[0]
        seconds = one + by_number * (1.0 / micro_batch - 1.0 / near[0])
        return max(seconds, 0.5 * min(self.updates.values()))


@dataclass(slots=True)
class RunTiming:
    """The measurements. Of each station only its present incarnation's work counts; times are kept over a restart.

    passes: of each generator that is on. Generators count as equal, so that the fastest is the one that others disturb
    least, and its times are those of all.
    ahead: passes queued behind one, by generator; since: times of commands under way, by (station, what). parts_since:
    the first command of the update under way, below 0 for none; trained_by: size of its micro-batches. updates: by that
    size; micro_batch, together: of the operation in force. events: all events so far.
    """

    settings: SchedulerSettings = field(metadata=UNSAVED)
    rules: MoveRules = field(metadata=UNSAVED)
    passes: dict[str, PassTimeModel] = field(default_factory=dict)
    updates: dict[int, RecentSeconds] = field(default_factory=dict)
    publications: RecentSeconds = field(default_factory=RecentSeconds)
    applies: RecentSeconds = field(default_factory=RecentSeconds)
    steps: RecentSeconds = field(default_factory=lambda: RecentSeconds(MANY_KEPT))
    absences: dict[str, RecentSeconds] = field(default_factory=dict)
    switches: dict[str, RecentSeconds] = field(default_factory=dict)
    simulators: dict[str, tuple[EnvBatchInfo, ...]] = field(default_factory=dict)
    generators: dict[str, int] = field(default_factory=dict)
    devices: dict[int, DeviceShare] = field(default_factory=dict)
    working: dict[str, PieceOfWork] = field(default_factory=dict)
    ahead: dict[str, tuple[Request, ...]] = field(default_factory=dict)
    slots: dict[str, SlotAbsence] = field(default_factory=dict)
    since: dict[tuple[str, str], float] = field(default_factory=dict)
    parts_since: float = -1.0
    trained_by: int = 0
    micro_batch: int = 0
    together: bool = False
    events: int = 0

    # ------------------------------------------------------------ what happens

    def on_event(self, event: Event, now: float) -> None:
        """Record what the event ends, before the commands that follow from it."""
        self.events += 1
        match event:
            case records.RequestArrived(simulator=simulator, slot=name):
                self._on_request(simulator, name, now)
            case records.BatchDone(generator=name):
                self._end_pass(name, now)
            case records.SampleFinished(ticket=ticket, chunk_steps=steps) if ticket >= 0:
                self.steps.add(float(steps))
            case records.UpdateDone():
                self._end_update(now)
            case records.Published(trainer=name):
                self._end(self.publications, (name, "publish"), now)
            case records.WeightsApplied(generator=name, pinned=False):
                self._end(self.applies, (name, "apply"), now)
            case records.DeviceTaken(station=name) | records.DeviceYielded(station=name):
                self.switches.setdefault(name, RecentSeconds()).add(event.seconds)
            case _:
                self._on_station(event, now)

    def _on_station(self, event: Event, now: float) -> None:
        """A station joins or is lost."""
        match event:
            case records.SimulatorJoined(simulator=name, batches=batches):
                self._lose(name, now)
                self.simulators[name] = tuple(batch for batch in batches if not batch.reserved)
            case records.GeneratorJoined(generator=name, depth=depth):
                self._lose(name, now)
                if name != self.settings.evaluator or not self.settings.evaluator_only:
                    self.generators[name] = depth if self.settings.batching == "dynamic" else 1
            case records.TrainerJoined():
                self._lose(TRAINER, now)
            case records.StationLost(station=name):
                self._lose(name, now)

    def on_commands(self, commands: Iterable[Command], now: float) -> None:
        for command in commands:
            match command:
                case records.Serve(generator=name, batch=batch) if not batch.pinned:
                    if name in self.working:
                        self.ahead[name] = batch.requests
                    else:
                        self._begin_pass(name, batch.requests, now)
                case records.StartUpdate(more=more, micro_batch=size):
                    if self.parts_since < 0:
                        self.parts_since, self.trained_by = now, size
                    if not more:
                        self._begin(TRAINER, now)
                case records.PublishWeights(trainer=name):
                    self.since[name, "publish"] = now
                case records.ApplyWeights(generator=name, pinned=False):
                    self.since[name, "apply"] = now

    def on_live_slots(self, changes: Iterable[tuple[str, bool]], now: float) -> None:
        """Slots that got tickets, or have none any more: their absences go on, or pause."""
        for name, live in changes:
            slot = self.slots.setdefault(name, SlotAbsence())
            if live and slot.since < 0:
                slot.since = now
            elif not live and slot.since >= 0:
                slot.seconds += now - slot.since
                slot.since = -1.0

    def restart_clock(self) -> None:
        """The run is resumed under another clock, with other stations: keep the times alone."""
        for table in (self.simulators, self.generators, self.devices, self.working, self.ahead, self.slots, self.since):
            table.clear()
        self.parts_since = -1.0

    # ------------------------------------------------------------ what is known

    def measured(self) -> MeasuredTimes | None:
        """The present times; None while some are unknown."""
        simulators = {name: batches for name, batches in self.simulators.items() if batches}  # not for evaluation alone
        absences = {name: tuple(self.absences[name].values) for name in simulators if name in self.absences}
        passes, known = self.undisturbed(), self.update_s and self.steps.values and self.generators
        if not known or passes is None or not absences or len(absences) < len(simulators):
            return None
        return MeasuredTimes(
            {name: _shape(batches) for name, batches in simulators.items()},
            absences,
            tuple(self.steps.values),
            dict(self.generators),
            passes.base_s,
            passes.per_row_s,
            self.applies.middle,
            {size: seconds.middle for size, seconds in self.updates.items()},
            self.publications.middle,
            {name: seconds.middle for name, seconds in self.switches.items()},
            self.micro_batch,
        )

    @property
    def update_s(self) -> float:
        """Seconds of an update with the present micro-batches; 0 if unknown."""
        return self.updates[self.micro_batch].middle if self.micro_batch in self.updates else 0.0

    def forget_costs(self) -> None:
        """Costs have changed: times of passes, updates and absences before that would be mixed with those after it. How
        a pass grows with its rows is kept, as passes of one size do not show it."""
        self.updates.clear()
        self.absences.clear()
        self.passes = {name: PassTimeModel(row_share=model.row_share) for name, model in self.passes.items()}

    def undisturbed(self, rows: float = 0.0) -> PassTimeModel | None:
        """Times of the fastest generator, by passes of `rows` rows, or of as many as they have; None if unknown."""
        known = [model for model in self.passes.values() if model.passes >= MIN_PASSES]
        rows = rows or (fmean(model.mean_rows for model in known) if known else 0.0)
        return min(known, key=lambda model: model.predict(rows), default=None)

    def point(self, rows: float = 0.0) -> TimingPoint:
        """The present point. rows: of the pass; by default as many as passes have now."""
        absences = [value for seconds in self.absences.values() for value in seconds.values]
        passes = self.undisturbed(rows)
        rows = rows or (0.0 if passes is None else passes.mean_rows)
        pass_s = 0.0 if passes is None else passes.predict(rows)
        return TimingPoint(rows, pass_s, fmean(absences) if absences else 0.0, self.update_s)

    def on_operation(self, operation: Operation) -> None:
        """Forget what would become old: times of generators that are off, and if stations share devices from now on, or
        do not any more, all that depend on it."""
        for name in operation.off:
            self.passes.pop(name, None)
        if operation.together != self.together:
            self.forget_costs()
            for piece in self.working.values():
                piece.counted = False
        self.micro_batch, self.together = operation.micro_batch, operation.together

    # ------------------------------------------------------------ slots

    def _on_request(self, simulator: str, name: str, now: float) -> None:
        slot = self.slots.setdefault(name, SlotAbsence())
        if slot.in_pass:  # it had its answer before the generator's report arrived here
            self._answered(slot, now)
        if slot.away and slot.since >= 0:
            seconds = slot.seconds + now - slot.since
            self.absences.setdefault(simulator, RecentSeconds(MANY_KEPT)).add(seconds)
        slot.away = False

    def _answered(self, slot: SlotAbsence, now: float) -> None:
        slot.away, slot.in_pass, slot.seconds = True, False, 0.0
        if slot.since >= 0:
            slot.since = now

    # ------------------------------------------------------------ passes and updates

    def _begin(self, station: str, now: float) -> PieceOfWork:
        own = self.rules.devices.get(station, ())
        work = [self.devices.setdefault(number, DeviceShare(since=now)).advance(now, 1) for number in own]
        piece = self.working[station] = PieceOfWork(now, work)
        return piece

    def _finish(self, station: str, now: float) -> tuple[PieceOfWork, float] | None:
        """End a station's piece of work; returns it and its seconds, as if alone."""
        piece = self.working.pop(station, None)
        if piece is None:
            return None
        own = self.rules.devices.get(station, ())
        ends = [self.devices[number].advance(now, -1) for number in own]
        shares = [end - begin for begin, end in zip(piece.work, ends, strict=True)]
        return piece, min(shares, default=now - piece.began)

    def _begin_pass(self, generator: str, requests: Sequence[Request], now: float) -> None:
        piece = self._begin(generator, now)
        piece.rows = sum(request.rows for request in requests)
        piece.slots = tuple(request.slot for request in requests)
        for name in piece.slots:
            self.slots.setdefault(name, SlotAbsence()).in_pass = True

    def _end_pass(self, generator: str, now: float) -> None:
        if (found := self._finish(generator, now)) is not None:
            piece, seconds = found
            model = self.passes.setdefault(generator, PassTimeModel())
            if piece.counted:
                model.record(padded(piece.rows, self.settings.buckets), seconds)
            for name in piece.slots:
                if name in self.slots and self.slots[name].in_pass:
                    self._answered(self.slots[name], now)
        if (requests := self.ahead.pop(generator, None)) is not None:
            self._begin_pass(generator, requests, now)

    def _end_update(self, now: float) -> None:
        """An update that was lent in parts shows only bounds of its time: from its last part on, and from its first."""
        found, since = self._finish(TRAINER, now), self.parts_since
        self.parts_since = -1.0
        if found is None or not found[0].counted:
            return
        piece, seconds = found
        updates = self.updates.setdefault(self.trained_by, RecentSeconds())
        if since < piece.began and updates.values:
            seconds = min(max(updates.middle, seconds), seconds + piece.began - since)
        updates.add(seconds)

    def _end(self, seconds: RecentSeconds, key: tuple[str, str], now: float) -> None:
        if (since := self.since.pop(key, None)) is not None:
            seconds.add(now - since)

    def _lose(self, station: str, now: float) -> None:
        """A station is lost, or joins anew."""
        self._finish(station, now)
        self.ahead.pop(station, None)
        self.generators.pop(station, None)
        for batch in self.simulators.pop(station, ()):
            for slot in batch.slots:
                self.slots.pop(slot.slot, None)
        self.since = {key: since for key, since in self.since.items() if key[0] != station}
        if station == TRAINER:
            self.parts_since = -1.0


def _shape(batches: Sequence[EnvBatchInfo]) -> tuple[int, int, int]:
    """Slots, rows of a slot and slots of an env batch, of a simulator whose env batches are about equal."""
    slots = [slot.rows for batch in batches for slot in batch.slots]
    return len(slots), max(1, round(fmean(slots))), max(1, round(len(slots) / len(batches)))
