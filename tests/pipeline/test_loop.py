"""The loop: decisions that can be replayed, ends that have a reason, faults that lose nothing."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from tests.pipeline.runs import config

from polyrhythm.clustersim.driver import Step
from polyrhythm.clustersim.replay import first_difference
from polyrhythm.errors import RunHalted
from polyrhythm.flow.conductor import Conductor
from polyrhythm.flow.records import (
    CancelRow,
    GeneratorJoined,
    RequestArrived,
    SampleFailed,
    SimulatorJoined,
    StartRows,
    Wake,
)
from polyrhythm.flow.settings import FlowSettings
from polyrhythm.flow.sharding import shard
from polyrhythm.pipeline.build import build_envs, build_pipeline
from polyrhythm.pipeline.episodes import held_out
from polyrhythm.pipeline.loop import Loop
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.inline import InlineLauncher

ASYNCHRONOUS = {
    "rollout": {"sharding": "even:2", "generators": 2, "routing": "least_loaded", "segment_steps": 8},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue", "sync_interval": 2},
    "training": {"order": "arrival"},
}


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["lockstep", "asynchronous"])
def test_a_live_runs_trace_gives_the_simulated_clusters_driver_the_same_commands(changes):
    """Guarantee 10: the events of a run with real stations, replayed where simulated ones are driven."""
    pipeline = build_pipeline(config(**changes), record=True)
    pipeline.loop.evaluate("before", held_out(7, 1, 1, greedy=True))
    pipeline.loop.train_until(3)
    pipeline.close()
    trace = pipeline.loop.trace
    assert sum(isinstance(decision.event, RequestArrived) for decision in trace) > 50
    fresh = Conductor(pipeline.loop.conductor.settings)
    steps = [Step(decision.now, decision.event, decision.commands) for decision in trace]
    assert first_difference(fresh, steps) is None
    assert fresh.deadline() == pipeline.loop.conductor.deadline()
    assert fresh.save() == pipeline.loop.conductor.save()


def test_the_lag_keeps_its_bound_and_nothing_is_left():
    pipeline = build_pipeline(config(**ASYNCHRONOUS), record=True)
    pipeline.loop.train_until(3)
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    lags = [c.version - oldest for c in commands if type(c).__name__ == "LendSamples" for oldest in c.oldest]
    assert len(lags) == 60
    assert 0 < max(lags) <= 2
    assert pipeline.loop.conductor.ledger.as_dict()["trained"] == 60
    assert pipeline.loop.conductor.ledger.imbalance == 0
    assert pipeline.launcher.payloads.leaked() == ()


class Flaky:
    """A real env batch whose step raises now and then: at every `period`-th call."""

    def __init__(self, env, period):
        self._env, self._period, self._calls = env, period, 0

    def __getattr__(self, name):
        return getattr(self._env, name)

    def step(self, rows, actions):
        self._calls += 1
        if self._calls % self._period == 0:
            raise RuntimeError("the simulator fell over")
        return self._env.step(rows, actions)


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["lockstep", "asynchronous"])
def test_an_environment_that_raises_costs_attempts_and_no_sample(changes, caplog):
    settings = config(**changes)
    pipeline = build_pipeline(settings, [Flaky(env, 37) for env in build_envs(settings)], record=True)
    with caplog.at_level(logging.CRITICAL, "polyrhythm.stations.env_host"):
        pipeline.loop.train_until(2)
    failed = [d.event for d in pipeline.loop.trace if isinstance(d.event, SampleFailed)]
    assert failed
    assert failed[0].reason == "step: RuntimeError: the simulator fell over"
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.running, ledger.reissuing) == (0, 0, 0)
    assert ledger.trained == 2 * settings.training.batch_size * settings.freshness.sync_interval
    assert pipeline.launcher.payloads.leaked() == ()


def test_an_environment_that_always_raises_ends_the_run_with_the_reason(caplog):
    settings = config(rollout={"max_dropped": 5})
    pipeline = build_pipeline(settings, [Flaky(env, 1) for env in build_envs(settings)])
    with caplog.at_level(logging.CRITICAL, "polyrhythm.stations.env_host"), pytest.raises(RunHalted, match="fell over"):
        pipeline.loop.train_until(1)


def test_a_run_that_nothing_can_move_says_who_waits_for_what():
    pipeline = build_pipeline(config())
    stuck = Loop(Conductor(pipeline.loop.conductor.settings), InlineLauncher(), time.monotonic, stall_s=0.05)
    with pytest.raises(RunHalted, match=r"nothing has happened.*\(none\).*trained 0, published -1.*trainer: none"):
        stuck.train_until(1)


class Silent:
    """A launcher whose stations never answer; waiting for them takes no real time."""

    def __init__(self):
        self.now, self.sent = 100.0, []

    def clock(self):
        return self.now

    def send(self, command):
        self.sent.append((self.now, command))

    def receive(self, timeout):
        self.now += timeout

    def reports(self):
        return []

    def work_done(self):
        return 0

    def outstanding(self):
        return ["e/0 is silent"]


def test_a_timer_that_is_due_wakes_the_conductor_before_the_run_is_called_stuck():
    launcher = Silent()
    conductor = Conductor(FlowSettings(batch_size=1, episode_deadline_s=7.0, max_attempts=2))
    loop = Loop(conductor, launcher, launcher.clock, stall_s=60.0, record=True)
    loop.tell(SimulatorJoined("s", 0, (shard("e", 1, "whole", []),)))
    loop.tell(GeneratorJoined("g", 0, 0))
    with pytest.raises(RunHalted, match="e/0 is silent"):
        loop.train_until(1)
    assert [(now, type(command)) for now, command in launcher.sent] == [(100.0, StartRows), (107.0, CancelRow)]
    assert [decision.now for decision in loop.trace if decision.event == Wake()] == [107.0]
    assert launcher.now == 167.0, "a quiet minute after the last thing that was done"


def test_a_timer_later_than_the_stall_limit_is_waited_for():
    launcher = Silent()
    loop = Loop(Conductor(FlowSettings(batch_size=1, episode_deadline_s=500.0)), launcher, launcher.clock, stall_s=60.0)
    loop.tell(SimulatorJoined("s", 0, (shard("e", 1, "whole", []),)))
    loop.tell(GeneratorJoined("g", 0, 0))
    with pytest.raises(RunHalted, match="nothing has happened for 60 s"):
        loop.train_until(1)
    assert (600.0, CancelRow) in [(now, type(command)) for now, command in launcher.sent]
    assert launcher.now == 660.0


class Busy(Silent):
    """Its stations do a unit of work every 50 s, say nothing, and end the test after the fourth."""

    def __init__(self):
        super().__init__()
        self.done = 0

    def work_done(self):
        return self.done

    def receive(self, timeout):
        self.now, self.done = self.now + 50.0, self.done + 1
        if self.done == 4:
            raise StopIteration


def test_a_station_at_work_is_no_stall_however_long_it_is_silent():
    launcher = Busy()
    loop = Loop(Conductor(FlowSettings(batch_size=1)), launcher, launcher.clock, stall_s=60.0)
    with pytest.raises(StopIteration):
        loop.train_until(1)


def granted(pipeline):
    """Who got which training ticket, in order: number, attempt, slot, row, version."""
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    return [
        (grant.ticket.number, grant.ticket.attempt, command.slot, grant.row, grant.ticket.version)
        for command in commands
        if isinstance(command, StartRows)
        for grant in command.grants
        if not grant.ticket.evaluation
    ]


@pytest.fixture(scope="module")
def without_evaluation():
    pipeline = build_pipeline(config(), record=True)
    pipeline.loop.train_until(3)
    return pipeline


@pytest.mark.parametrize("places", [(0,), (1,), (0, 2)], ids=["before", "in the middle", "twice"])
@pytest.mark.parametrize("episodes", [3, 9], ids=["fewer than rows", "more than rows"])
def test_an_evaluation_leaves_training_as_it_was(places, episodes, without_evaluation):
    """The same tickets in the same rows, and the same weights to the last bit."""
    pipeline = build_pipeline(config(), record=True)
    for place in places:
        if place:
            pipeline.loop.train_until(place)
        results = pipeline.loop.evaluate(f"at {place}", held_out(episodes, 5, 1, greedy=True))
        assert {result.version for result in results} == {place}
        assert len(results) == episodes
    pipeline.loop.train_until(3)
    assert granted(pipeline) == granted(without_evaluation)
    wanted, found = (as_module(each.policy).state_dict() for each in (without_evaluation, pipeline))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert pipeline.loop.conductor.ledger.as_dict() == without_evaluation.loop.conductor.ledger.as_dict()


def test_the_same_held_out_episodes_give_the_same_results():
    pipeline = build_pipeline(config())
    for greedy in (True, False):
        episodes = held_out(8, 2, 1, greedy=greedy)
        one = pipeline.loop.evaluate(f"one {greedy}", episodes)
        two = pipeline.loop.evaluate(f"two {greedy}", episodes)
        assert sorted(r.episode_return for r in one) == sorted(r.episode_return for r in two)
