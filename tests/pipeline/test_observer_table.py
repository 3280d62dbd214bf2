"""Observers are called for the events and commands that they hear, in order, and lose nothing by it."""

from __future__ import annotations

import random

import pytest
from tests.oracles.arbitrary import arbitrary_cluster
from tests.pipeline.runs import config
from tests.pipeline.test_loop import ASYNCHRONOUS

from polyrhythm.conductors import build_conductor
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer, ObserverTable
from polyrhythm.pipeline.observers.idle import IdleMeter, PassMeter
from polyrhythm.pipeline.observers.metrics import EpisodeTracker, LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm_bench.chaos.ticket_audit import TicketAudit

WAKE, GRANT = records.Wake(), records.StartRows("s", "e/0", ())
SERVE = records.Serve("g", records.Batch(0, "g", ()))


class Noting(Observer):
    """Notes its name and what it is told."""

    def __init__(self, name, notes):
        self.name, self._notes = name, notes

    def on_decision(self, now, event, commands):
        self._notes.append((self.name, now, type(event)))

    def on_report(self, now, report):
        self._notes.append((self.name, now, report.topic))

    def on_tick(self, now):
        self._notes.append((self.name, now, "tick"))


class HearsServe(Noting):
    hears = (records.Serve,)


class HearsWake(Noting):
    hears = (records.Wake, records.StartRows)


class Ticks(Noting):
    tick_s = 1.0


class LaterTicks(Noting):
    tick_s = 2.5


def test_an_observer_that_adds_and_removes_others_at_its_tick_ends_no_run():
    notes = []

    class Replaces(Observer):
        tick_s = 1.0

        def on_tick(self, now):
            table.remove(self, old)
            table.add(Ticks("new", notes))

    old = Ticks("old", notes)
    table = ObserverTable([Replaces(), old])
    table.tick(0.0)
    table.tick(1.0)
    assert [name for name, *_ in notes] == ["new"]


def test_an_observer_is_called_once_for_a_decision_with_a_type_that_it_hears_in_the_order_of_adding():
    notes = []
    table = ObserverTable([HearsWake("a", notes), Noting("deaf", notes), HearsServe("b", notes), HearsWake("c", notes)])
    table.decide(1.0, records.TrainUntil(1), [])
    table.decide(2.0, records.TrainUntil(1), [SERVE, SERVE])
    table.decide(3.0, WAKE, [GRANT, SERVE])
    assert [(name, now) for name, now, _ in notes] == [("b", 2.0), ("a", 3.0), ("b", 3.0), ("c", 3.0)]
    notes.clear()
    table.report(4.0, Report("trainer", 0, "update", 0, {}))
    assert [name for name, *_ in notes] == ["a", "deaf", "b", "c"]


def test_who_is_removed_is_called_no_more_and_who_is_added_is_called_last():
    notes = []
    first, second = HearsWake("first", notes), Ticks("second", notes)
    table = ObserverTable([first, second])
    table.decide(1.0, WAKE, [])
    table.remove(first, second)
    table.add(HearsWake("third", notes))
    table.decide(2.0, WAKE, [])
    table.tick(9.0)
    assert [(name, now) for name, now, _ in notes] == [("first", 1.0), ("third", 2.0)]


def test_ticks_come_when_they_are_due_and_not_sooner():
    notes = []
    table = ObserverTable([Ticks("often", notes), LaterTicks("seldom", notes), Noting("never", notes)])
    for tenth in range(60):
        table.tick(tenth / 10)
    assert [now for name, now, _ in notes if name == "often"] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert [now for name, now, _ in notes if name == "seldom"] == [0.0, 2.5, 5.0]
    assert not [name for name, *_ in notes if name == "never"]


def test_an_observer_that_hears_what_is_no_record_is_refused():
    class Wrong(Observer):
        hears = (records.Wake, Report)

    with pytest.raises(ValueError, match=r"^Wrong\.hears: Report is neither an event nor a command$"):
        ObserverTable([Wrong()])


class Untouched(Observer):
    """Fails if it is told of what it does not hear."""

    hears = (records.UpdateDone,)

    def on_decision(self, now, event, commands):
        assert isinstance(event, records.UpdateDone)


def test_a_real_run_calls_an_observer_for_its_types_alone():
    notes = []
    pipeline = build_pipeline(RunContext(config(**ASYNCHRONOUS)), record=True)
    pipeline.loop.add_observers(Untouched(), HearsServe("serve", notes))
    pipeline.loop.train_until(2)
    pipeline.close()
    serves = [d for d in pipeline.loop.trace if any(isinstance(command, records.Serve) for command in d.commands)]
    told = [kind for _, _, kind in notes if isinstance(kind, type)]
    assert told == [type(decision.event) for decision in serves]
    assert len(told) > 10


def reported(episodes):
    """The metrics of those that completed since the last report."""
    episodes.on_report(0.0, Report("trainer", 0, "update", 0, {}))
    return episodes.metrics


def watchers(conductor):
    """Those whose results depend on decisions alone, and how to ask each for its result."""
    idle, passes, episodes = IdleMeter(conductor, 0.0), PassMeter((4, 8), 0.005), EpisodeTracker(2)
    lags, totals, audit = LagHistogram(), RunTotals(), TicketAudit(1.0, "sample")
    return {
        idle: lambda: idle.take(1e6),
        passes: lambda: passes.take(1e6),
        episodes: lambda: (episodes.recent, reported(episodes)),
        lags: lags.summary,
        totals: totals.as_dict,
        audit: lambda: (audit.lag(), audit.violations),
    }


@pytest.mark.parametrize("seed", range(40))
def test_an_observer_finds_the_same_as_if_it_were_told_everything(seed):
    """Over simulated runs with faults: `hears` leaves out nothing that matters."""
    own = arbitrary_cluster(random.Random(seed), redundant=seed % 4 == 0)
    cluster = VirtualCluster(own, build_conductor(own.scheduler), record=True)
    cluster.run()
    conductor = build_conductor(own.scheduler)
    some, others = watchers(conductor), watchers(conductor)
    table = ObserverTable(list(some))
    for step in cluster.driver.steps:
        commands = conductor.handle(step.event, step.now)
        conductor.deadline()
        table.decide(step.now, step.event, commands)
        for observer in others:
            observer.on_decision(step.now, step.event, commands)
    for ask, ask_other in zip(some.values(), others.values(), strict=True):
        assert ask() == _approximately(ask_other())


def _approximately(found):
    """Sums over time may differ in the last digit: they are added up in fewer parts."""
    return pytest.approx(found) if isinstance(found, dict) and all(type(x) is float for x in found.values()) else found
