"""Redundant groups and filtered ones, live: what is trained on, what is thrown away, and that its memory comes back."""

from __future__ import annotations

from statistics import fmean

import pytest
from tests.pipeline.runs import LOCKSTEP

from polyrhythm.config.load import merge, validate
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.scheduler.records import SampleFinished, StartUpdate

ASYNCHRONOUS = {
    "rollout": {"rows": 12, "sharding": "even:4", "routing": "least_loaded"},
    "batching": {"type": "dynamic", "max_rows": 6},
    "freshness": {"max_lag": 1, "on_update": "continue"},
    "training": {"order": "arrival", "mini_batch_samples": 8},
}


def trained(groups):
    """The pipeline after its run, and the samples that were lent, by their return."""
    config = validate(merge(merge(LOCKSTEP, ASYNCHRONOUS), {"groups": {"size": 2, **groups}}))
    pipeline = build_pipeline(RunContext(config), record=True)
    try:
        pipeline.loop.train_until(config.training.versions)
        ledger = pipeline.loop.conductor.ledger
        assert ledger.imbalance == 0
        assert ledger.trained == config.training.versions * config.training.batch_size
        held = {sample.payload_id for sample in pipeline.loop.conductor.rollout.samples.values() if sample.payload_id}
        assert set(pipeline.launcher.payloads.in_flight.finished()) == held == set()
    finally:
        pipeline.launcher.close()
    steps = pipeline.loop.trace
    lent = [number for step in steps for c in step.commands if isinstance(c, StartUpdate) for number in c.tickets]
    finished = {step.event.ticket: step.event for step in steps if isinstance(step.event, SampleFinished)}
    return pipeline, [finished[number].episode_return for number in lent]


@pytest.mark.parametrize(("groups", "members"), [(2, 0), (0, 1), (1, 1)])
def test_the_first_complete_groups_and_members_are_trained_on(groups, members):
    pipeline, returns = trained({"extra_groups": groups, "extra_members": members})
    conductor = pipeline.loop.conductor
    assert len(returns) == conductor.ledger.trained
    selection = conductor.rollout.summary()["selection"]
    surplus = sum(selection[fate]["samples"] for fate in ("released", "cancelled", "waiting"))
    assert conductor.ledger.dropped == {"surplus": surplus}
    assert surplus > 0
    assert selection["trained"]["samples"] == len(returns)
    assert selection["trained"]["seconds"] > 0


def test_groups_out_of_bounds_are_replaced():
    _, before = trained({})
    bound = fmean(before)
    pipeline, returns = trained({"min_return": bound, "max_filtered": 1000})
    pairs = list(zip(returns[::2], returns[1::2], strict=True))
    assert all(fmean(pair) >= bound for pair in pairs), "lent group by group"
    assert pipeline.loop.conductor.ledger.dropped["filtered"] > 0
    assert pipeline.loop.conductor.rollout.summary() == {"kept_out_of_bounds": 0}


def test_when_too_many_are_filtered_the_run_says_that_it_takes_the_others(caplog):
    pipeline, _ = trained({"min_return": 1e9, "max_filtered": 2})
    assert "2 groups of one update were filtered; the others count as they are" in caplog.text
    assert 2 * 2 <= pipeline.loop.conductor.ledger.dropped["filtered"] <= 3 * 2 * 2, "two groups of two, an update"
    assert pipeline.loop.conductor.rollout.summary() == {"kept_out_of_bounds": 3 * 4}
