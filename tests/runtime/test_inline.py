"""The inline launcher: turns in a fixed order, one event at a time, a wait that ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import pending_work
from polyrhythm.runtime.launcher import build_inline_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Reply, Report, StationTraits
from polyrhythm.scheduler.records import (
    ApplyWeights,
    CancelRow,
    DropReason,
    EnvBatchInfo,
    GeneratorJoined,
    Grant,
    PublishWeights,
    RefuseRequest,
    ReleasePayloads,
    SampleFailed,
    SaveTrainer,
    SimulatorJoined,
    SlotInfo,
    StartRows,
    TargetReached,
    Ticket,
    WeightsApplied,
)
from polyrhythm.specs import ArraySpec, WeightsLayout

LAYOUT = ArenaLayout(4, 2, 1, {"x": ArraySpec((3,), "float32")}, {"value": ArraySpec((), "float32")}, {"s.0/0": 2})


class Worker:
    """Does `units` units; each is noted, and emits an event if it is in `speaks`. A simulator if it has slots."""

    def __init__(self, factory, context, slot=""):
        self.name, self.context, self.slot, self.diary = factory.name, context, slot, factory.diary
        self.units, self.speaks = factory.units, factory.speaks
        self.heard, self.closed = [], False

    @property
    def traits(self):
        return StationTraits(deliver=self.deliver)

    def joined(self):
        if not self.slot:
            return GeneratorJoined(self.name, 0)
        return SimulatorJoined(self.name, 0, (EnvBatchInfo(self.slot, (SlotInfo(self.slot, 0, 2),)),))

    def handle(self, command):
        self.heard.append(command)

    def deliver(self, reply):
        self.heard.append(reply)

    def work(self):
        if not self.units:
            return False
        self.units -= 1
        self.diary.append((self.slot or self.name, self.units))
        if self.units in self.speaks:
            self.context.channels.emit(WeightsApplied(self.name, 0, self.units))
        return True

    def pending_work(self):
        return [f"{self.slot or self.name} has {self.units} units left"]

    def statistics(self):
        return {"units": float(self.units), "env_steps": 3.0}

    def close(self):
        self.closed = True


@dataclass
class Workers:
    """A station with a part for each slot, or with one if it has none."""

    name: str
    diary: list
    units: int = 0
    speaks: tuple = ()
    slots: tuple = ()
    worker = Worker

    def parts(self, context, incarnation):
        self.made = []

        def make(slot):
            self.made.append(self.worker(self, context, slot))
            return self.made[-1]

        return [(f"{self.name}.{slot}", lambda slot=slot: make(slot)) for slot in self.slots or ("",)]


def hosted(*, clock=None, slots=(), **units):
    """Stations of the given (units, speaks); a simulator `s` with `slots` comes last."""
    diary = []
    factories = [Workers(name, diary, *given) for name, given in units.items()]
    factories += [Workers("s", diary, 1, slots=slots)] if slots else []
    seats = [(factory, Resources()) for factory in factories]
    launcher = build_inline_launcher(seats, LAYOUT, WeightsLayout.of({}), **({"clock": clock} if clock else {}))
    joined = launcher.start()
    return launcher, diary, [worker for factory in factories for worker in factory.made], joined


def test_stations_take_turns_until_one_says_something():
    launcher, diary, *_ = hosted(a=(3, ()), b=(2, (0,)), c=(1, ()))
    assert launcher.receive(9.0) == WeightsApplied("b", 0, 0)
    assert diary == [("a", 2), ("b", 1), ("c", 0), ("a", 1), ("b", 0)]
    assert launcher.receive(0.01) is None
    assert diary[5:] == [("a", 0)]
    assert launcher.hosting.work_done == 6


def test_without_work_it_waits_no_longer_than_told():
    launcher, *_ = hosted(a=(0, ()))
    begin = launcher.clock()
    assert launcher.receive(0.02) is None
    assert launcher.clock() - begin >= 0.02
    assert launcher.receive(0.0) is None


def test_the_timeout_is_kept_while_there_is_work():
    time = iter(range(1000))
    launcher, _, (worker,), _ = hosted(a=(500, ()), clock=lambda: float(next(time)))
    assert launcher.receive(5.0) is None
    assert worker.units > 400


def test_all_parts_of_a_station_announce_themselves_as_one_in_the_order_of_the_stations():
    launcher, _, workers, joined = hosted(a=(0, ()), slots=("s.0/0", "s.1/0"))
    infos = tuple(EnvBatchInfo(slot, (SlotInfo(slot, 0, 2),)) for slot in ("s.0/0", "s.1/0"))
    assert joined == [GeneratorJoined("a", 0), SimulatorJoined("s", 0, infos)]
    launcher.payloads.arena.obs["x"][0] = 7
    assert all(np.shares_memory(worker.context.arena.obs["x"], launcher.payloads.arena.obs["x"]) for worker in workers)
    assert all(worker.context.weights() is launcher.weights for worker in workers)


def test_commands_go_to_the_station_or_the_slot_that_they_name():
    launcher, _, (a, b, first, second), _ = hosted(a=(0, ()), b=(0, ()), slots=("s.0/0", "s.1/0"))
    launcher.send(ApplyWeights("a", 1))
    launcher.send(PublishWeights("b", 2))
    launcher.send(SaveTrainer("b"))
    launcher.send(CancelRow("s", "s.1/0", 7, 1))
    launcher.send(RefuseRequest("s", "s.0/0", 3, "why"))
    assert (a.heard, b.heard) == ([ApplyWeights("a", 1)], [PublishWeights("b", 2), SaveTrainer("b")])
    assert (first.heard, second.heard) == ([RefuseRequest("s", "s.0/0", 3, "why")], [CancelRow("s", "s.1/0", 7, 1)])
    with pytest.raises(TypeError, match="TargetReached"):
        launcher.send(TargetReached(1))


def test_a_grant_comes_with_a_block_that_is_the_rows_until_its_attempt_ends():
    launcher, _, (first, _), _ = hosted(slots=("s.0/0", "s.1/0"))
    grants = tuple(Grant(row, Ticket(row, row, 0, 0, 0, 0, 0)) for row in range(2))
    command = StartRows("s", "s.0/0", grants)
    launcher.send(command)
    (start,) = first.heard
    assert isinstance(start, StartRows)
    assert [replace(grant, block=-1) for grant in start.grants] == [*grants]
    assert len({grant.block for grant in start.grants}) == 2
    assert launcher.payloads.in_flight.describe() == "2 blocks free, 2 being written, 0 finished"
    failed = SampleFailed("s", 0, 0, 1, DropReason.ENVIRONMENT_RAISED, "fell over")
    first.context.channels.emit(failed)
    assert launcher.receive(1.0) == failed
    assert launcher.payloads.in_flight.describe() == "3 blocks free, 1 being written, 0 finished"


def test_released_payloads_are_free():
    launcher, *_ = hosted(a=(0, ()))
    launcher.payloads.in_flight.restore(("0", "3"))
    launcher.send(ReleasePayloads(("3", "")))
    assert launcher.payloads.in_flight.finished() == ("0",)
    with pytest.raises(KeyError):
        launcher.send(ReleasePayloads(("3",)))


def test_replies_reports_and_counters():
    launcher, _, (a, first, second), _ = hosted(a=(2, ()), slots=("s.0/0", "s.1/0"))
    reply = Reply("s.s.1/0", "s.1/0", 1, np.zeros(1, LAYOUT.answer_dtype))
    a.context.channels.reply([reply])
    assert (first.heard, second.heard) == ([], [reply])
    a.context.channels.report(Report("a", 0, "update", 1, {"x": 1.0}))
    assert [report.step for report in launcher.hosting.reports()] == [1]
    assert launcher.hosting.reports() == []
    launcher.receive(0.01)
    statistics = launcher.hosting.statistics(fresh=True)
    assert statistics["a"]["busy_s"] > 0
    assert statistics["a"]["units"] == 0
    assert statistics["s"]["env_steps"] == 6.0, "of both parts"
    assert pending_work(launcher.hosting) == ["a has 0 units left", "s.0/0 has 0 units left", "s.1/0 has 0 units left"]
    launcher.close()
    assert all(worker.closed for worker in (a, first, second))


class Fragile(Worker):
    """Fails while it is made, or while it is closed."""

    def __init__(self, factory, context, slot=""):
        if slot == "unmade":
            raise ValueError("cannot be made")
        super().__init__(factory, context, slot)

    def close(self):
        super().close()
        if self.slot == "unclosed":
            raise ValueError("cannot be closed")


@dataclass
class FragileWorkers(Workers):
    worker = Fragile


def test_what_was_made_before_a_part_that_cannot_be_made_is_closed():
    factory = FragileWorkers("s", [], slots=("s.0/0", "unmade"))
    launcher = build_inline_launcher([(factory, Resources())], LAYOUT, WeightsLayout.of({}))
    with pytest.raises(ValueError, match="cannot be made"):
        launcher.start()
    launcher.close()
    assert [worker.closed for worker in factory.made] == [True]


def test_a_part_that_cannot_be_closed_does_not_keep_the_others_open():
    factory = FragileWorkers("s", [], slots=("unclosed", "s.0/0"))
    launcher = build_inline_launcher([(factory, Resources())], LAYOUT, WeightsLayout.of({}))
    launcher.start()
    with pytest.raises(ValueError, match="cannot be closed"):
        launcher.close()
    assert [worker.closed for worker in factory.made] == [True, True]
