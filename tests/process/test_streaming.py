"""Updates that begin with a part of their samples, in real processes, with faults in the middle of them."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise

import pytest
from tests.long import long
from tests.pipeline.test_checkpoints import snapshot_of
from tests.process.networks import apart_by_setting
from tests.process.runs import ASYNCHRONOUS, children, config
from tests.process.test_supervision import at_update, lost, run

from polyrhythm.config.load import merge
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.persistence.checkpoints import load_run
from polyrhythm.pipeline.persistence.snapshot import write_snapshot
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.plugins.cluster.launching import launch_on
from polyrhythm.plugins.timeline.observer import TraceObserver
from polyrhythm.plugins.timeline.trace import TraceWriter
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler import records
from polyrhythm_bench.chaos.ticket_audit import TicketAudit

STREAMED = merge(
    ASYNCHRONOUS,
    {
        "groups": {"size": 2},
        "algorithm": {"advantage": "grpo", "value": {"coef": 0.0}},
        "rollout": {"generators": 1, "segment_steps": 0, "max_attempts": 9},
        "training": {"minibatch_steps": 0},
    },
)
#: Episodes of 0.1 to 0.6 s.
SLOW = merge(STREAMED, {"policy": {"type": "gaussian"}}) | {
    "env": {"type": "latency", "episode_steps": 10, "step_time": "lognormal:20ms:0.6"}
}


def updates_of(pipeline):
    """Update → its `StartUpdate`s, each with its time; of a lost trainer's updates the last ones."""
    found, open_update = {}, -1
    for decision in pipeline.loop.trace:
        if isinstance(decision.event, records.TrainerJoined):
            open_update = -1
        for command in decision.commands:
            if isinstance(command, records.StartUpdate):
                if command.update != open_update:
                    found[command.update] = []
                found[command.update].append((decision.now, command))
                open_update = command.update if command.more else -1
    return found


def audited(pipeline):
    """The pipeline, after a book that is kept from events and commands alone has found nothing wrong."""
    settings = pipeline.loop.conductor.settings
    book, lags = TicketAudit(settings.max_lag, settings.bound), LagHistogram()
    for decision in pipeline.loop.trace:
        book.on_decision(decision.now, decision.event, decision.commands)
        lags.on_decision(decision.now, decision.event, decision.commands)
    ledger = pipeline.loop.conductor.ledger
    book.settle(ledger, may_roll_back=False)
    assert book.violations == []
    lags.check_bound(settings.max_lag, settings.bound, clean=False)
    assert sum(lags.counts.values()) == ledger.trained + ledger.rolled_back
    return pipeline


def test_the_trainer_begins_before_the_last_sample_is_finished(tmp_path):
    pipeline = build_pipeline(RunContext(config(SLOW), folder=tmp_path), record=True)
    loop = pipeline.loop
    try:
        with TraceWriter(tmp_path / "trace.json") as writer:
            began = loop.clock()
            timeline = TraceObserver(writer, pipeline.launcher, began)
            loop.add_observers(timeline)
            loop.train_until(4)
            timeline.finish(loop.clock())
    finally:
        pipeline.close()
    assert not children()
    finished = {d.event.ticket: d.now for d in loop.trace if isinstance(d.event, records.SampleFinished)}
    ended = [0.0] + [d.now for d in loop.trace if isinstance(d.event, records.UpdateDone)]
    events = json.loads((tmp_path / "trace.json").read_text())
    (lane,) = [e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == "trainer"]
    bars = [began + e["ts"] / 1e6 for e in events if e["ph"] == "X" and e["tid"] == lane and "update" in e["name"]]
    early = 0
    for (before, after), parts in zip(pairwise(ended), updates_of(pipeline).values(), strict=True):
        assert [command.more for _, command in parts] == [True] * (len(parts) - 1) + [False]
        last = max(finished[ticket] for _, command in parts for ticket in command.tickets)
        early += any(before <= bar < last - 0.02 for bar in bars if bar < after)
    assert early, "in none of four updates"
    audited(pipeline)


#: Mini-batches of four are stepped as they are complete.
STEPPED = {"mini_batch_samples": 4, "require_batches": 2}


@pytest.mark.parametrize(
    ("station", "divided"),
    [
        ("trainer", STEPPED),
        *(
            pytest.param(*others, marks=long(4, "a station killed in the middle of an update"))
            for others in (("trainer", {}), ("simulator-0", STEPPED), ("generator-0", {}))
        ),
    ],
)
def test_a_station_that_is_killed_in_the_middle_of_an_update_costs_no_sample(station, divided, tmp_path):
    def kill(pipeline):
        conductor = pipeline.loop.conductor
        for update in (1, 3):
            at_update(update, lambda _: None)(pipeline)
            while not (conductor.updates.in_training and not conductor.updates.is_complete):
                if conductor.versions.updates > 5:
                    return
            os.kill(process_ids(pipeline.launcher.hosting)[station], signal.SIGKILL)

    objective = {"proximal": "behavior" if divided else "recompute"}
    changes = {"training": {"versions": 6, **divided}, "algorithm": objective}
    pipeline = audited(run(tmp_path, versions=6, base=SLOW, during=kill, **changes))
    assert lost(pipeline)[0].station == station
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.trained, ledger.dropped) == (0, 48, {})


def stopped(loop, when):
    """Train until this is so, as an operator's signal would stop the run there."""
    loop.stop = when
    with pytest.raises(Interrupted):
        loop.train_until(4)
    loop.stop = lambda: False


def test_a_run_that_is_stopped_in_the_middle_of_an_update_goes_on_with_its_samples(tmp_path):
    """The trainer saves what it was before the update at once, and does not wait for the rest of its samples."""
    pipeline = build_pipeline(RunContext(config(SLOW), folder=tmp_path), record=True)
    conductor, loop = pipeline.loop.conductor, pipeline.loop
    try:
        stopped(loop, lambda: in_the_middle(conductor, 2))
        lent = [number for group in conductor.updates.in_training for number in group.members]
        assert loop.wind_down(60.0)
        assert in_the_middle(conductor, 2)
        path = write_snapshot(snapshot_of(tmp_path, pipeline), pipeline.states.keep)
    finally:
        pipeline.close()
    saved = load_run(path)
    again = build_pipeline(RunContext(config(SLOW), folder=tmp_path, saved=saved), record=True)
    try:
        assert {again.loop.conductor.rollout.samples[number].state.value for number in lent} <= {"buffered", "lent"}
        again.loop.train_until(4)
        ledger = again.loop.conductor.ledger
        assert (ledger.imbalance, ledger.trained, ledger.rolled_back) == (0, 32, 0)
    finally:
        again.close()
    assert not children()


def test_a_stop_waits_for_the_rest_of_an_update_that_has_changed_the_weights(tmp_path):
    """A state between two of its mini-batches cannot be saved, and what was trained before it must not be lost."""
    divided = {"training": STEPPED, "algorithm": {"proximal": "behavior"}}
    pipeline = build_pipeline(RunContext(config(SLOW, **divided), folder=tmp_path), record=True)
    conductor, loop = pipeline.loop.conductor, pipeline.loop

    def stepped():
        lent = sum(group.size for group in conductor.updates.in_training)
        return in_the_middle(conductor, 2) and lent >= STEPPED["mini_batch_samples"]

    try:
        stopped(loop, stepped)
        assert loop.wind_down(60.0)
        assert conductor.versions.updates == 3
        assert loop.trace[-1].event.updates == 3
    finally:
        pipeline.close()
    assert not children()


@long(6, "parts on another host")
def test_parts_that_lie_on_another_host_are_fetched_as_they_come(tmp_path):
    """The second simulator is on another host than the trainer."""
    one, two = apart_by_setting(tmp_path, 2)
    pipeline = build_pipeline(
        RunContext(config(SLOW), folder=tmp_path / "run", launch=launch_on([one, two, one, one])), record=True
    )
    try:
        pipeline.loop.train_until(4)
    finally:
        pipeline.close()
    assert not children()
    lent = [command for parts in updates_of(pipeline).values() for _, command in parts]
    events = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.SampleFinished)]
    made = {event.ticket: event.simulator for event in events}
    assert {made[ticket] for command in lent for ticket in command.tickets} == {"simulator-0", "simulator-1"}
    assert sum(command.more for command in lent) > 4
    ledger = audited(pipeline).loop.conductor.ledger
    assert (ledger.imbalance, ledger.trained) == (0, 32)


def in_the_middle(conductor, update):
    updates = conductor.updates
    return conductor.versions.updates == update and bool(updates.in_training) and not updates.is_complete
