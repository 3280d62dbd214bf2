"""One suite for all launchers: the same pipeline gives the same guarantees in one process and in many."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

import psutil
import pytest
import torch
import zmq
from tests.process.runs import LOCKSTEP, PATIENCE_S, children, config, orphaned_folders

from polyrhythm.pipeline.build import Pipeline, build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.runtime.factories import Resources
from polyrhythm.runtime.hosting import dropped_messages, pending_work, process_ids
from polyrhythm.runtime.launcher import build_local_launcher
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.messages import Report, StationTraits
from polyrhythm.runtime.transport import wire
from polyrhythm.runtime.transport.sockets import Outbox
from polyrhythm.scheduler import records
from polyrhythm.specs import WeightsLayout

LAUNCHERS = {
    "inline": {"launcher": "inline"},
    "local": {"launcher": "local"},
    "local-over-tcp": {"launcher": "local", "data_plane": {"transport": "tcp"}},
}


@pytest.fixture(scope="module", params=LAUNCHERS, ids=str)
def asynchronous(request, tmp_path_factory):
    """An asynchronous run that has ended: two simulators of two env batches, two generators, segments."""
    settings = config(**LAUNCHERS[request.param])
    pipeline = build_pipeline(RunContext(settings, folder=tmp_path_factory.mktemp("run")), record=True)
    try:
        pipeline.loop.evaluate("before", held_out(7, 1, 1, greedy=True))
        pipeline.loop.train_until(4)
        statistics = pipeline.launcher.hosting.statistics(fresh=True)
        finished = pipeline.launcher.payloads.in_flight.finished()
        assert dropped_messages(pipeline.launcher.hosting) == {}, "what stations say is expected"
        version, weights = pipeline.weights.read()
    finally:
        pipeline.close()
    assert not children()
    return pipeline, statistics, finished, (version, weights)


def said(pipeline: Pipeline, kind: type) -> list:
    """Events and commands of this kind, in order."""
    return [
        record
        for decision in pipeline.loop.trace
        for record in (decision.event, *decision.commands)
        if isinstance(record, kind)
    ]


def test_every_sample_is_trained_once_and_none_is_left(asynchronous):
    pipeline, _, finished, _ = asynchronous
    lent = Counter(ticket for command in said(pipeline, records.StartUpdate) for ticket in command.tickets)
    ledger = pipeline.loop.conductor.ledger
    assert ledger.as_dict()["trained"] == 32 == len(lent)
    assert set(lent.values()) == {1}
    assert (ledger.imbalance, ledger.running, finished) == (0, 0, ())


def test_the_lag_keeps_its_bound(asynchronous):
    pipeline, *_ = asynchronous
    lags = [c.version - oldest for c in said(pipeline, records.StartUpdate) for oldest in c.oldest]
    assert max(lags) <= math.ceil(pipeline.loop.conductor.settings.max_lag)


def test_every_request_is_served_once(asynchronous):
    pipeline, *_ = asynchronous
    asked = Counter((event.slot, event.sequence) for event in said(pipeline, records.RequestArrived))
    requests = [request for command in said(pipeline, records.Serve) for request in command.batch.requests]
    served = Counter((request.slot, request.sequence) for request in requests)
    refused = Counter((command.slot, command.sequence) for command in said(pipeline, records.RefuseRequest))
    assert set(asked.values()) == {1}
    assert served + refused == asked


def test_every_version_is_published_and_applied_by_both_generators(asynchronous):
    pipeline, _, _, (version, _) = asynchronous
    assert [event.version for event in said(pipeline, records.Published)] == [1, 2, 3, 4]
    assert version == 4
    applied = said(pipeline, records.WeightsApplied)
    for generator in ("generator-0", "generator-1"):
        versions = [event.version for event in applied if event.generator == generator]
        assert versions == sorted(set(versions))
        assert versions[-1] == 4


def test_an_evaluation_is_complete_and_mixed_with_nothing(asynchronous):
    pipeline, *_ = asynchronous
    results = said(pipeline, records.SampleEvaluated)
    assert len(results) == 7
    assert {result.version for result in results} == {0}


def test_stations_tell_how_busy_they_were(asynchronous):
    pipeline, statistics, *_ = asynchronous
    assert list(statistics) == ["simulator-0", "simulator-1", "generator-0", "generator-1", "trainer"]
    assert all(counts["busy_s"] > 0 for counts in statistics.values())
    steps = sum(event.env_steps for event in said(pipeline, records.SampleFinished))
    assert sum(statistics[f"simulator-{i}"]["env_steps"] for i in range(2)) >= steps > 0
    assert statistics["trainer"]["updates"] == 4


def test_nothing_is_left_behind(asynchronous):
    assert not children()
    assert not orphaned_folders()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_lockstep_grants_and_trains_the_same_samples_under_every_launcher(launcher, tmp_path):
    def run(name, folder):
        folder.mkdir()
        pipeline = build_pipeline(RunContext(config(LOCKSTEP, **LAUNCHERS[name]), folder=folder), record=True)
        try:
            pipeline.loop.train_until(3)
            weights = pipeline.weights.read()[1]
        finally:
            pipeline.close()
        granted = {
            grant.ticket.number: (grant.row, grant.ticket.seed, grant.ticket.noise, grant.ticket.version)
            for command in said(pipeline, records.StartRows)
            for grant in command.grants
        }
        returns = {event.ticket: event.episode_return for event in said(pipeline, records.SampleFinished)}
        lent = [command.tickets for command in said(pipeline, records.StartUpdate)]
        return granted, returns, lent, {name: tensor.tolist() for name, tensor in weights.items()}

    assert run(launcher, tmp_path / "a") == run("inline", tmp_path / "b")


class Sits:
    """A station with nothing to do."""

    traits = StationTraits()

    def __init__(self, name, incarnation):
        self.name, self.incarnation, self.asked = name, incarnation, 0

    def joined(self):
        return records.TrainerJoined(self.name, self.incarnation, 0)

    def handle(self, command):
        pass

    def work(self):
        return False

    def current_call(self):
        return "", 0.0

    def pending_work(self):
        self.asked += 1
        return [f"{self.name} sits"]

    def statistics(self):
        return {"asked": float(self.asked)}

    def close(self):
        pass


@dataclass(frozen=True)
class Sitting:
    """Makes one that sits."""

    name: str

    def parts(self, context, incarnation):
        return [(self.name, lambda: Sits(self.name, incarnation))]


def test_an_event_that_has_come_is_found_at_once_whatever_came_before_it(tmp_path):
    """A late main process asks for it with no time to wait; heartbeats and reports must not hide it."""
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    launcher = build_local_launcher(
        [(Sitting("t"), Resources())], layout, WeightsLayout.of({}), config().supervision, tmp_path
    )
    with closing(launcher), zmq.Context() as context:
        for event in launcher.start():
            assert event == records.TrainerJoined("t", 0, 0)
        outbox = Outbox(context, launcher.hosting._inbox.endpoint)
        for update, wait_s in enumerate((0.1, 1.0, 10.0)):  # until all has come, which nobody can see
            launcher.send(records.StartUpdate("t", update, 0, (0,), ("0",)))
            for message in (
                *[wire.Heartbeat("t", 0, "", 0.0, number, (), {}) for number in range(5)],
                Report("t", 0, "update", update, {}),
                records.UpdateDone("t", 0, update),
            ):
                outbox.send(wire.encode(message))
            time.sleep(wait_s)
            found = launcher.receive(0.0)
            if found is not None:
                break
            assert launcher.receive(PATIENCE_S) == records.UpdateDone("t", 0, update)
        assert found == records.UpdateDone("t", 0, update)
        assert launcher.receive(0.0) is None
        outbox.close()


def test_the_process_of_a_station_has_the_environment_of_its_seat(tmp_path):
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    seats = {"t": Resources("cuda:1", 3, {"CUDA_VISIBLE_DEVICES": "1"}), "u": Resources()}
    jobs = [(Sitting(name), seat) for name, seat in seats.items()]
    launcher = build_local_launcher(jobs, layout, WeightsLayout.of({}), config().supervision, tmp_path)
    with closing(launcher):
        launcher.start()
        found = {name: psutil.Process(pid).environ() for name, pid in process_ids(launcher.hosting).items()}
    assert (found["t"]["CUDA_VISIBLE_DEVICES"], found["t"]["OMP_NUM_THREADS"]) == ("1", "3")
    assert found["u"].get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")


def test_what_is_not_finished_is_asked_for_by_a_stall_report_alone(tmp_path):
    layout = ArenaLayout(blocks=1, steps=1, chunk=1, obs={}, answers={}, slots={})
    jobs = [(Sitting("t"), Resources()), (Sitting("u"), Resources())]
    launcher = build_local_launcher(jobs, layout, WeightsLayout.of({}), config().supervision, tmp_path)
    with closing(launcher):
        launcher.start()
        for _ in range(3):
            statistics = launcher.hosting.statistics(fresh=True)  # each asks for a heartbeat
        assert [counts.get("asked", 0.0) for counts in statistics.values()] == [0.0, 0.0]
        assert pending_work(launcher.hosting) == ["t sits", "u sits"]
        statistics = launcher.hosting.statistics(fresh=True)
        assert [counts["asked"] for counts in statistics.values()] == [1.0, 1.0]


class Urgency:
    """Orders requests like arrival does, until it raises: at the twentieth request after the two of the check."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: records.Request) -> float:
        self.calls += 1
        if self.calls % 22 == 0:
            raise KeyError("urgency")
        return request.arrived


urgency = Urgency()


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_users_function_that_raises_ends_the_run_with_its_traceback(launcher, tmp_path):
    settings = config(**LAUNCHERS[launcher], rollout={"queue_key": f"{__name__}:urgency"})
    with (
        closing(build_pipeline(RunContext(settings, folder=tmp_path))) as pipeline,
        pytest.raises(KeyError, match="urgency") as raised,
    ):
        pipeline.loop.train_until(4)
    assert any(entry.path.name == "test_launchers.py" and entry.name == "__call__" for entry in raised.traceback)
    assert not children()


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_updates_that_skip_every_step_are_published_all_the_same(launcher, tmp_path):
    changes = {
        "launcher": launcher,
        "policy": {"type": "tests.process.policies:DisagreeingSettings"},
        "algorithm": {"early_stop_ratio": 1.5, "proximal": "behavior"},
    }
    stopped = EarlyStops()
    with closing(build_pipeline(RunContext(config(**changes), folder=tmp_path))) as pipeline:
        first = pipeline.weights.read()[1]
        pipeline.loop.add_observers(stopped)
        pipeline.loop.train_until(4)
        conductor = pipeline.loop.conductor
        version, weights = pipeline.weights.read()
        states = [pipeline.states.updates(path) for path in pipeline.states.paths()]
    assert stopped.shares == [1.0] * 4, "each update skipped all its steps"
    assert (version, conductor.versions.applied, conductor.ledger.trained) == (4, 4, 32)
    assert states == [3, 4]
    assert all(torch.equal(weights[name], first[name]) for name in first)


class EarlyStops(Observer):
    """Share of steps that each update skipped."""

    def __init__(self):
        self.shares = []

    def on_report(self, now, report):
        self.shares.append(report.values["train/actor/early_stopped"])
