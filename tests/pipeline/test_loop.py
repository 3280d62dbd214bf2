"""The loop: decisions that can be replayed, ends that have a reason, faults that lose nothing."""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial
from typing import Literal

import pytest
import torch
from tests.oracles.replay import first_difference
from tests.pipeline.runs import config

from polyrhythm.conductors import build_conductor
from polyrhythm.envs.gymnasium_env import GymnasiumBatch, GymnasiumSettings
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.run_loop import Interrupted, RunLoop
from polyrhythm.pipeline.train import wind_down
from polyrhythm.runtime.launcher import build_inline_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.scheduler.records import (
    BatchDone,
    CancelRow,
    Checkpointed,
    GeneratorJoined,
    RequestArrived,
    SampleEnd,
    SampleFailed,
    SampleFinished,
    Serve,
    SimulatorJoined,
    StartRows,
    TrainerJoined,
    TrainUntil,
    Wake,
)
from polyrhythm.scheduler.rollout.rows import shard
from polyrhythm.scheduler.settings import SchedulerSettings
from polyrhythm.specs import WeightsLayout
from polyrhythm.stations import one_pass
from polyrhythm.stations.passes import DevicePasses

ASYNCHRONOUS = {
    "rollout": {"sharding": "even:2", "generators": 2, "routing": "least_loaded", "segment_steps": 8},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue", "sync_interval": 2},
    "training": {"order": "arrival"},
}


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["lockstep", "asynchronous"])
def test_a_live_runs_trace_gives_the_simulated_clusters_driver_the_same_commands(changes):
    """Guarantee 10: the events of a run with real stations, replayed where simulated ones are driven."""
    pipeline = build_pipeline(RunContext(config(**changes)), record=True)
    pipeline.loop.evaluate("before", held_out(7, 1, 1, greedy=True))
    pipeline.loop.train_until(3)
    pipeline.close()
    trace = pipeline.loop.trace
    assert sum(isinstance(decision.event, RequestArrived) for decision in trace) > 50
    fresh = build_conductor(pipeline.loop.conductor.settings)
    assert first_difference(fresh, trace) is None
    assert fresh.deadline() == pipeline.loop.conductor.deadline()
    assert fresh.save() == pipeline.loop.conductor.save()


def test_copies_of_the_last_episodes_change_no_result():
    """Thirteen episodes on six rows: the last ones have copies on the other rows, and equal results."""
    found = {}
    for hedge in (False, True):
        pipeline = build_pipeline(
            RunContext(config(evaluation={"hedge": hedge}, batching={"type": "dynamic"})), record=True
        )
        results = pipeline.loop.evaluate("before", held_out(13, 1, 1, greedy=False))
        trace = pipeline.loop.trace
        pipeline.close()
        starts = [c for decision in trace for c in decision.commands if isinstance(c, StartRows)]
        tickets = [grant.ticket for start in starts for grant in start.grants]
        assert (len(tickets) > 13) == hedge
        found[hedge] = sorted((each.seed, each.episode_return, each.env_steps) for each in results)
        assert first_difference(build_conductor(pipeline.loop.conductor.settings), trace) is None
    assert len(found[True]) == 13
    assert found[True] == found[False]


def test_batches_wait_behind_passes_that_run_beside_the_host_and_every_sample_is_trained(monkeypatch):
    """Generators with the passes of a device, on the CPU: what is sent behind a pass is launched before its end."""
    passes = partial(DevicePasses, capture=None)
    monkeypatch.setattr(one_pass, "passes_on", lambda device, layout, rows, *_: passes(device, layout, rows))
    one = {**ASYNCHRONOUS["rollout"], "generators": 1, "sharding": "even:6"}
    loaded = {**ASYNCHRONOUS, "rollout": one, "batching": {"type": "dynamic", "max_rows": 1, "max_wait_ms": 1}}
    pipeline = build_pipeline(RunContext(config(**loaded)), record=True)
    pipeline.loop.evaluate("before", held_out(7, 1, 1, greedy=True))
    pipeline.loop.train_until(3)
    pipeline.close()
    under_way, most = 0, 0
    for decision in pipeline.loop.trace:
        under_way -= isinstance(decision.event, BatchDone)
        under_way += sum(isinstance(command, Serve) for command in decision.commands)
        most = max(most, under_way)
    assert (under_way, most) == (0, 2)
    conductor = pipeline.loop.conductor
    assert (conductor.ledger.trained, conductor.ledger.imbalance) == (60, 0)
    fresh = build_conductor(conductor.settings)
    assert first_difference(fresh, pipeline.loop.trace) is None
    assert fresh.save() == conductor.save()


def test_the_lag_keeps_its_bound_and_nothing_is_left():
    pipeline = build_pipeline(RunContext(config(**ASYNCHRONOUS)), record=True)
    pipeline.loop.train_until(3)
    commands = [command for decision in pipeline.loop.trace for command in decision.commands]
    lags = [c.version - oldest for c in commands if type(c).__name__ == "StartUpdate" for oldest in c.oldest]
    assert len(lags) == 60
    assert 0 < max(lags) <= 2
    assert pipeline.loop.conductor.ledger.as_dict()["trained"] == 60
    assert pipeline.loop.conductor.ledger.imbalance == 0
    assert pipeline.launcher.payloads.in_flight.finished() == ()


class FlakySettings(GymnasiumSettings):
    """CartPole whose step raises now and then: at every `period`-th call."""

    type: Literal["tests.pipeline.test_loop:FlakySettings"] = "tests.pipeline.test_loop:FlakySettings"
    period: int = 1

    def build(self, rows):
        return Flaky(self, rows)


class Flaky(GymnasiumBatch):
    def __init__(self, settings, rows):
        super().__init__(settings, rows)
        self._period, self._calls = settings.period, 0

    def step(self, rows, actions):
        self._calls += 1
        if self._calls % self._period == 0:
            raise RuntimeError("the simulator fell over")
        return super().step(rows, actions)


def flaky(period, **changes):
    env = {"type": "tests.pipeline.test_loop:FlakySettings", "id": "CartPole-v1", "max_steps": 40, "period": period}
    return config(env=env, **changes)


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["lockstep", "asynchronous"])
def test_an_environment_that_raises_costs_attempts_and_no_sample(changes, caplog):
    settings = flaky(37, **changes)
    pipeline = build_pipeline(RunContext(settings), record=True)
    with caplog.at_level(logging.CRITICAL, "polyrhythm.stations.simulator.station"):
        pipeline.loop.train_until(2)
    failed = [d.event for d in pipeline.loop.trace if isinstance(d.event, SampleFailed)]
    assert failed
    assert failed[0].error == "step: RuntimeError: the simulator fell over"
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.running, ledger.reissuing) == (0, 0, 0)
    assert ledger.trained == 2 * settings.training.batch_size * settings.freshness.sync_interval
    assert pipeline.launcher.payloads.in_flight.describe().endswith("blocks free, 0 being written, 0 finished")


def test_an_environment_that_always_raises_ends_the_run_with_the_reason(caplog):
    pipeline = build_pipeline(RunContext(flaky(1, rollout={"max_dropped": 5})))
    quiet = caplog.at_level(logging.CRITICAL, "polyrhythm.stations.simulator.station")
    with quiet, pytest.raises(RunHalted, match="fell over"):
        pipeline.loop.train_until(1)


def test_a_run_that_nothing_can_move_says_who_waits_for_what():
    pipeline = build_pipeline(RunContext(config()))
    empty = build_inline_launcher([], ArenaLayout(1, 1, 1, {}, {}, {}), WeightsLayout.of({}))
    stuck = RunLoop(build_conductor(pipeline.loop.conductor.settings), empty, time.monotonic, stall_s=0.05)
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

    @property
    def hosting(self):
        return self

    work_done, names = 0, ("s",)

    def statistics(self, *, fresh, pending_work):
        assert fresh
        assert pending_work

    def station(self, name):
        return self

    def pending_work(self):
        return ["e/0 is silent"]


def test_a_timer_that_is_due_wakes_the_conductor_before_the_run_is_called_stuck():
    launcher = Silent()
    conductor = build_conductor(SchedulerSettings(batch_size=1, episode_deadline_s=7.0, max_attempts=2))
    loop = RunLoop(conductor, launcher, launcher.clock, stall_s=60.0, record=True)
    loop.submit(SimulatorJoined("s", 0, (shard("e", 1, "whole", []),)))
    loop.submit(GeneratorJoined("g", 0, 0))
    with pytest.raises(RunHalted, match="e/0 is silent"):
        loop.train_until(1)
    assert [(now, type(command)) for now, command in launcher.sent] == [(100.0, StartRows), (107.0, CancelRow)]
    assert [decision.now for decision in loop.trace if decision.event == Wake()] == [107.0]
    assert launcher.now == 167.0, "a quiet minute after the last thing that was done"


def test_a_timer_later_than_the_stall_limit_is_waited_for():
    launcher = Silent()
    loop = RunLoop(
        build_conductor(SchedulerSettings(batch_size=1, episode_deadline_s=500.0)),
        launcher,
        launcher.clock,
        stall_s=60.0,
    )
    loop.submit(SimulatorJoined("s", 0, (shard("e", 1, "whole", []),)))
    loop.submit(GeneratorJoined("g", 0, 0))
    with pytest.raises(RunHalted, match="nothing has happened for 60 s"):
        loop.train_until(1)
    assert (600.0, CancelRow) in [(now, type(command)) for now, command in launcher.sent]
    assert launcher.now == 660.0


class Late(Silent):
    """It is heard only long after the sample came, when its deadline has passed."""

    def __init__(self, events):
        super().__init__()
        self.events = deque(events)

    def receive(self, timeout):
        if self.events:
            self.now = 120.0
            return self.events.popleft()
        return super().receive(timeout)


def test_what_came_before_a_deadline_is_heard_before_it_counts():
    """A main process that was stopped, or overloaded, must not cancel what has ended meanwhile."""
    late = Late([])
    loop = RunLoop(
        build_conductor(SchedulerSettings(batch_size=1, episode_deadline_s=7.0)), late, late.clock, record=True
    )
    loop.submit(SimulatorJoined("s", 0, (shard("e", 2, "whole", []),)))
    loop.submit(GeneratorJoined("g", 0, 0))
    loop.submit(TrainUntil(2))
    late.now = 120.0
    late.events.append(SampleFinished("s", 0, 0, 1, "0", SampleEnd.TERMINATED, 1, 1, 0, 0, True, 1.0))
    with pytest.raises(RunHalted):
        loop.train_until(2)
    told = [type(decision.event) for decision in loop.trace]
    assert told.index(SampleFinished) < told.index(Wake)
    cancelled = [command.ticket for _, command in late.sent if isinstance(command, CancelRow)]
    assert 0 not in cancelled
    assert 1 in cancelled


class Flood(Late):
    """Events never stop coming."""

    def receive(self, timeout):
        return Checkpointed("nobody", 0, 1)


def test_a_flood_of_events_puts_a_deadline_off_but_not_for_ever():
    flood = Flood([])
    loop = RunLoop(
        build_conductor(SchedulerSettings(batch_size=1, episode_deadline_s=7.0)), flood, flood.clock, record=True
    )
    loop.submit(SimulatorJoined("s", 0, (shard("e", 1, "whole", []),)))
    loop.submit(GeneratorJoined("g", 0, 0))
    loop.submit(TrainUntil(1))
    flood.now = 120.0
    loop.stop = lambda: Wake() == loop.trace[-2].event
    with pytest.raises(Interrupted):
        loop.train_until(1)
    assert sum(isinstance(decision.event, Checkpointed) for decision in loop.trace) == 10_001


class Busy(Silent):
    """Its stations do a unit of work every 50 s, say nothing, and end the test after the fourth."""

    def __init__(self):
        super().__init__()
        self.done = 0

    @property
    def work_done(self):
        return self.done

    def receive(self, timeout):
        self.now, self.done = self.now + 50.0, self.done + 1
        if self.done == 4:
            raise StopIteration


def test_a_station_at_work_is_no_stall_however_long_it_is_silent():
    launcher = Busy()
    loop = RunLoop(build_conductor(SchedulerSettings(batch_size=1)), launcher, launcher.clock, stall_s=60.0)
    with pytest.raises(StopIteration):
        loop.train_until(1)


def interrupted(folder, stop):
    """A run that was told to stop when `stop(conductor)` was first true, and what it had sent by then."""
    pipeline = build_pipeline(RunContext(config(), folder=folder), record=True)
    loop = pipeline.loop
    loop.stop = lambda: stop(loop.conductor)
    with pytest.raises(Interrupted):
        loop.train_until(3)
    return pipeline


def test_winding_down_finishes_the_update_under_way_and_begins_nothing_new(tmp_path):
    pipeline = interrupted(tmp_path, lambda c: c.versions.updates == 1 and c.updates.in_training)
    conductor, before = pipeline.loop.conductor, pipeline.launcher.hosting.statistics(fresh=True)
    assert wind_down(pipeline.loop, 60.0) == "the update under way is finished"
    assert conductor.versions.updates == 2
    assert pipeline.states.updates(pipeline.states.paths()[-1]) == 2
    after = pipeline.launcher.hosting.statistics(fresh=True)
    assert after["trainer"]["updates"] == before["trainer"]["updates"] + 1
    assert after["simulator-0"]["env_steps"] == before["simulator-0"]["env_steps"], "the batch was complete"
    assert conductor.ledger.imbalance == 0


def test_winding_down_between_two_updates_saves_what_there_is(tmp_path):
    pipeline = interrupted(tmp_path, lambda conductor: conductor.versions.updates == 1 and conductor.ledger.running)
    assert wind_down(pipeline.loop, 60.0) == "no update was under way"
    assert pipeline.loop.conductor.versions.updates == 1
    assert pipeline.states.updates(pipeline.states.paths()[-1]) == 1


def test_winding_down_takes_no_longer_than_it_may(tmp_path):
    pipeline = interrupted(tmp_path, lambda c: c.versions.updates == 1 and c.updates.in_training)
    assert wind_down(pipeline.loop, 0.0) == "the update under way is abandoned"
    assert pipeline.loop.conductor.versions.updates == 1
    pipeline = interrupted(tmp_path, lambda conductor: conductor.versions.updates == 1 and conductor.ledger.running)
    assert wind_down(pipeline.loop, 0.0) == "the trainer's state was not saved within 0 s"


class Hanging(Silent):
    """Its trainer is in one call all the time."""

    def current_call(self):
        return f"in one update for {self.now - 60.0:g} s"


def test_winding_down_says_once_whom_it_waits_for_and_how_long(caplog):
    launcher = Hanging()
    loop = RunLoop(build_conductor(SchedulerSettings(batch_size=1)), launcher, launcher.clock)
    loop.submit(TrainerJoined("trainer", 0))
    with caplog.at_level(logging.INFO):
        assert not loop.wind_down(10.0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "waiting for the trainer's state to be saved (trainer: in one update for 41 s), 10 s at most; another signal "
        "stops at once"
    )
    assert launcher.now == 110.0


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
    pipeline = build_pipeline(RunContext(config()), record=True)
    pipeline.loop.train_until(3)
    return pipeline


@pytest.mark.parametrize("places", [(0,), (1,), (0, 2)], ids=["before", "in the middle", "twice"])
@pytest.mark.parametrize("episodes", [3, 9], ids=["fewer than rows", "more than rows"])
def test_an_evaluation_leaves_training_as_it_was(places, episodes, without_evaluation):
    """The same tickets in the same rows, and the same weights to the last bit."""
    pipeline = build_pipeline(RunContext(config()), record=True)
    for place in places:
        if place:
            pipeline.loop.train_until(place)
        results = pipeline.loop.evaluate(f"at {place}", held_out(episodes, 5, 1, greedy=True))
        assert {result.version for result in results} == {place}
        assert len(results) == episodes
    pipeline.loop.train_until(3)
    assert granted(pipeline) == granted(without_evaluation)
    wanted, found = (each.weights.read()[1] for each in (without_evaluation, pipeline))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert pipeline.loop.conductor.ledger.as_dict() == without_evaluation.loop.conductor.ledger.as_dict()


def test_the_same_held_out_episodes_give_the_same_results():
    pipeline = build_pipeline(RunContext(config()))
    for greedy in (True, False):
        episodes = held_out(8, 2, 1, greedy=greedy)
        one = pipeline.loop.evaluate(f"one {greedy}", episodes)
        two = pipeline.loop.evaluate(f"two {greedy}", episodes)
        assert sorted(r.episode_return for r in one) == sorted(r.episode_return for r in two)
