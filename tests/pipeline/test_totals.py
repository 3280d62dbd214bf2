"""What is counted over all parts of a run, and what is looked at while it goes on."""

from __future__ import annotations

import json

from tests.pipeline.runs import config
from tests.pipeline.test_loop import ASYNCHRONOUS
from tests.pipeline.test_observers import finish

from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.totals import RunTotals, StationActivity
from polyrhythm.scheduler.records import SampleFinished, StationLost, Wake


def test_an_account_goes_on_where_it_was_saved():
    first = RunTotals()
    for event in (finish(0, 1.0, 8), Wake(), StationLost("trainer", 0, "was killed"), finish(1, 0.0, 3)):
        first.on_decision(0.0, event, [])
    second = RunTotals(json.loads(json.dumps(first.as_dict())))
    second.on_decision(0.0, finish(2, 0.0, 4), [])
    second.on_decision(0.0, StationLost("generator-0", 1, "hung"), [])
    assert (first.transitions, len(first.faults)) == (11, 1)
    assert second.transitions == 15
    assert second.faults == [
        {"station": "trainer", "reason": "was killed", "transitions": 8},
        {"station": "generator-0", "reason": "hung", "transitions": 15},
    ]


def test_a_move_to_a_node_that_came_is_no_fault_but_what_is_done_again_for_it_is_no_clean_run():
    why = "moves to node 10.0.0.7 (5be1f3a2), which has room"
    first = RunTotals()
    first.on_decision(0.0, StationLost("simulator-0", 0, why, blame=False, moves=True), [])
    assert (first.faults, first.undisturbed) == ([], False)
    second = RunTotals(json.loads(json.dumps(first.as_dict())))
    assert (second.faults, second.moves, second.undisturbed) == ([], 1, False)
    for event in (
        StationLost("simulator-0", 1, "is on host host-1, which is lost", blame=False),
        StationLost("simulator-0", 2, why, blame=False),
    ):
        second.on_decision(0.0, event, [])
    assert (len(second.faults), second.moves) == (2, 1)
    assert RunTotals().undisturbed


def test_what_was_lost_with_a_host_that_ended_the_run_is_told_once():
    """Though the run was saved before it, or after it."""
    earlier = RunTotals()
    earlier.on_decision(0.0, StationLost("generator-0", 0, "hung"), [])
    saved = json.loads(json.dumps(earlier.as_dict()))
    earlier.on_decision(0.0, finish(0, 1.0, 8), [])
    earlier.note_lost_host("host-1", ["trainer", "simulator-0"])
    later = RunTotals(saved)
    later.recall(earlier.faults)
    again = RunTotals(json.loads(json.dumps(later.as_dict())))
    again.recall(earlier.faults)
    with_host = {"reason": "is on host host-1, which is lost", "transitions": 8}
    expected = [
        {"station": "generator-0", "reason": "hung", "transitions": 0},
        *[{"station": name, **with_host} for name in ("trainer", "simulator-0")],
    ]
    assert later.faults == expected
    assert again.faults == expected


def test_a_live_run_is_counted_and_looked_at():
    pipeline = build_pipeline(RunContext(config(**ASYNCHRONOUS)), record=True)
    account, stations = RunTotals(), StationActivity(pipeline.launcher)
    looks = []
    stations.activity.take = lambda now, counters: looks.append(counters)
    pipeline.loop.add_observers(account, stations)
    pipeline.loop.train_until(2)
    pipeline.close()
    finished = [d.event.env_steps for d in pipeline.loop.trace if isinstance(d.event, SampleFinished)]
    assert account.transitions == sum(finished) > 0
    assert looks
    assert set(looks[-1]) == {"simulator-0", "generator-0", "generator-1", "trainer"}
