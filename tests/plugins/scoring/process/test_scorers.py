"""Scorers that raise, hang and are killed: their samples are scored again, and the run goes on."""

from __future__ import annotations

import os
import re
import signal

import pytest
from tests.long import long
from tests.process.runs import ASYNCHRONOUS
from tests.process.test_supervision import at_update, balanced, lost, run

from polyrhythm.config.load import merge
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler import records
from polyrhythm.scheduler.records import DropReason

SCORED = merge(
    ASYNCHRONOUS,
    {
        "rollout": {"simulators": 1, "env_batches": 2, "generators": 1, "segment_steps": 0},
        "scoring": {"function": "tests.process.rewards:one"},
    },
)


def faulty(folder, fault, **settings):
    options = {"marker": str(folder / "misbehaved"), "fault": fault}
    return {"function": "tests.process.rewards:Faulty", "options": options, **settings}


def tries(pipeline):
    return [c for d in pipeline.loop.trace for c in d.commands if isinstance(c, records.ScoreSample)]


def trained_scores(pipeline):
    updates = [c for d in pipeline.loop.trace for c in d.commands if isinstance(c, records.StartUpdate)]
    return [score for update in updates for score in update.scores]


@long(4, "two scorers; another test kills one of two")
def test_every_sample_is_scored_by_one_of_several_processes(tmp_path):
    pipeline = run(tmp_path, base=SCORED, scoring={"processes": 2, "function": "tests.process.rewards:slow"})
    assert balanced(pipeline, 32)
    assert trained_scores(pipeline) == [1.0] * 32
    assert {command.scorer for command in tries(pipeline)} == {"scorer-0", "scorer-1"}


@pytest.mark.parametrize("fault", ["raise", pytest.param("nan", marks=long(2, "a score that is not finite"))])
def test_a_sample_whose_score_fails_is_scored_again(fault, tmp_path):
    pipeline = run(tmp_path, base=SCORED, scoring=faulty(tmp_path, fault))
    assert lost(pipeline) == []
    assert balanced(pipeline, 32)
    (failed,) = [d.event for d in pipeline.loop.trace if isinstance(d.event, records.ScoringFailed)]
    assert ("ValueError: no opinion" if fault == "raise" else "return a finite number") in failed.error
    assert [command.ticket for command in tries(pipeline)].count(failed.ticket) == 2
    assert trained_scores(pipeline) == [1.0] * 32


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param("hang", r"in one score for .* s, in __call__ \(.*rewards", marks=long(5, "a scorer that hangs")),
        ("exit", "status 7"),
    ],
)
def test_a_scorer_that_hangs_or_ends_is_replaced(fault, why, tmp_path):
    scoring = faulty(tmp_path, fault, at_a_time=2)
    pipeline = run(tmp_path, base=SCORED, scoring=scoring, supervision={"score_s": 3.0})
    (event,) = lost(pipeline)
    assert event.station == "scorer-0"
    assert re.search(why, event.reason)
    assert balanced(pipeline, 32)
    assert trained_scores(pipeline) == [1.0] * 32
    assert len(tries(pipeline)) > len({command.ticket for command in tries(pipeline)})


def test_a_scorer_and_the_trainer_that_are_killed_cost_nothing(tmp_path):
    def kill(pipeline):
        for name in ("scorer-0", "trainer"):
            os.kill(process_ids(pipeline.launcher.hosting)[name], signal.SIGKILL)

    scoring = {"processes": 2, "function": "tests.process.rewards:slow"}
    pipeline = run(tmp_path, base=SCORED, during=at_update(1, kill), scoring=scoring)
    assert sorted(event.station for event in lost(pipeline)) == ["scorer-0", "trainer"]
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.dropped, ledger.trained) == (0, {}, 32)


def test_after_the_last_try_a_sample_is_dropped_and_replaced(tmp_path):
    options = {"share": 3}
    scoring = {"function": "tests.process.rewards:picky", "options": options, "max_attempts": 2}
    pipeline = run(tmp_path, base=SCORED, scoring=scoring)
    ledger = pipeline.loop.conductor.ledger
    assert (ledger.imbalance, ledger.trained) == (0, 32)
    assert set(ledger.dropped) == {DropReason.SCORING_FAILED}
    failed = [d.event.ticket for d in pipeline.loop.trace if isinstance(d.event, records.ScoringFailed)]
    assert set(map(failed.count, failed)) <= {1, 2}
    assert pipeline.failures.counts == {"scoring.function = tests.process.rewards:picky: ValueError": len(failed)}
