"""The inline launcher: turns in a fixed order, one event at a time, a wait that ends."""

from __future__ import annotations

import pytest

from polyrhythm.flow.records import ApplyWeights, PublishWeights, ReleasePayloads, TargetReached, WeightsApplied
from polyrhythm.runtime.inline import InlineLauncher
from polyrhythm.runtime.messages import Reply, Report


class Worker:
    """Does `units` units; each is noted, and emits an event if it is in `speaks`."""

    def __init__(self, name, launcher, diary, units=0, speaks=()):
        self.name, self.launcher, self.diary, self.units, self.speaks = name, launcher, diary, units, speaks
        self.commands, self.closed = [], False

    def handle(self, command):
        self.commands.append(command)

    def work(self):
        if not self.units:
            return False
        self.units -= 1
        self.diary.append((self.name, self.units))
        if self.units in self.speaks:
            self.launcher.emit(WeightsApplied(self.name, 0, self.units))
        return True

    def outstanding(self):
        return [f"{self.name} has {self.units} units left"]

    def statistics(self):
        return {"units": float(self.units), "env_steps": 3.0}

    def close(self):
        self.closed = True


def hosted(**units):
    launcher, diary = InlineLauncher(), []
    workers = [Worker(name, launcher, diary, *given) for name, given in units.items()]
    for worker in workers:
        launcher.add(worker)
    return launcher, diary, workers


def test_stations_take_turns_until_one_says_something():
    launcher, diary, _ = hosted(a=(3, ()), b=(2, (0,)), c=(1, ()))
    assert launcher.receive(None) == WeightsApplied("b", 0, 0)
    assert diary == [("a", 2), ("b", 1), ("c", 0), ("a", 1), ("b", 0)]
    assert launcher.receive(None) is None
    assert diary[5:] == [("a", 0)]


def test_without_work_it_waits_no_longer_than_told():
    launcher, _, _ = hosted(a=(0, ()))
    begin = launcher.clock()
    assert launcher.receive(0.02) is None
    assert launcher.clock() - begin >= 0.02
    assert launcher.receive(None) is None


def test_the_timeout_is_kept_while_there_is_work():
    time = iter(range(1000))
    launcher = InlineLauncher(clock=lambda: float(next(time)))
    launcher.add(Worker("a", launcher, [], units=500))
    assert launcher.receive(5.0) is None
    assert launcher._stations["a"].units > 400


def test_commands_go_to_the_station_that_they_name():
    launcher, _, (a, b) = hosted(a=(0, ()), b=(0, ()))
    launcher.send(ApplyWeights("a", 1))
    launcher.send(PublishWeights("b", 2))
    assert (a.commands, b.commands) == ([ApplyWeights("a", 1)], [PublishWeights("b", 2)])
    with pytest.raises(TypeError, match="TargetReached"):
        launcher.send(TargetReached(1))


def test_released_payloads_are_gone_and_what_is_left_is_a_leak():
    launcher = InlineLauncher()
    one, two = launcher.payloads.put("s", "first"), launcher.payloads.put("s", "second")
    launcher.send(ReleasePayloads((one, "")))
    assert launcher.payloads.leaked() == (two,)
    with pytest.raises(KeyError):
        launcher.send(ReleasePayloads((one,)))


def test_replies_reports_and_counters():
    launcher, _, workers = hosted(a=(2, ()))
    got = []
    launcher.connect("slot", got.append)
    reply = Reply("slot", 1, 0, {})
    launcher.reply(reply)
    assert got == [reply]
    launcher.report(Report("a", "update", 1, {"x": 1.0}))
    assert [report.step for report in launcher.reports()] == [1]
    assert launcher.reports() == []
    launcher.receive(None)
    statistics = launcher.statistics()["a"]
    assert statistics["busy_s"] > 0
    assert statistics["units"] == 0
    assert launcher.transitions() == 3.0
    assert launcher.outstanding() == ["a has 0 units left"]
    launcher.close()
    assert workers[0].closed
