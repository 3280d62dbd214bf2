"""The promises about data in real processes: every preset, with faults, slow publication and evaluation beside it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from tests.long import long
from tests.process.runs import ASYNCHRONOUS
from tests.process.test_supervision import at_update, lost, run

from polyrhythm.config.load import merge
from polyrhythm.config.presets import PRESETS, preset
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.runtime.hosting import process_ids
from polyrhythm.scheduler import records
from polyrhythm_bench.chaos.ticket_audit import TicketAudit

#: Who is killed together, and at which update.
KILLED = {2: ("trainer", "simulator-evaluation"), 6: ("generator-0", "simulator-0")}
SLOW = {"type": "tests.process.policies:SlowlyPublishedSettings", "hidden": 16, "seconds": 0.05}
EPISODES = tuple(records.Episode(0, 0, seed, greedy=True) for seed in range(6))


#: The usual tests have the one that lends samples across versions.
OTHERS = ("lockstep", "on_policy_pipeline", "stale_stream", "stream_off_policy")
MARKS = {name: long(8, f"the preset {name} under faults") for name in OTHERS}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in PRESETS])
def test_a_preset_keeps_its_promises_under_faults_and_slow_publication(name: str, tmp_path: Any) -> None:
    """Guarantees 2 and 3, by a book that is kept from events and commands alone."""
    base = merge(merge(ASYNCHRONOUS, {"rollout": {"generators": 1, "segment_steps": 0}}), preset(name, ASYNCHRONOUS))
    versions = 12 // base["freshness"].get("sync_interval", 1)

    def disturb(pipeline: Any) -> None:
        for update, stations in KILLED.items():
            at_update(update, lambda _: None)(pipeline)
            pipeline.loop.submit_later(records.Evaluate(f"during-{update}", EPISODES, background=True))
            for station in stations:
                os.kill(process_ids(pipeline.launcher.hosting)[station], signal.SIGKILL)

    pipeline = run(
        tmp_path,
        versions=versions,
        base=base,
        during=disturb,
        policy=SLOW,
        training={"versions": versions},
        evaluation={"every": 100, "every_episodes": 1, "rows": 2},
        rollout={"max_attempts": 9},
    )
    conductor = pipeline.loop.conductor
    settings = conductor.settings
    book, lags = TicketAudit(settings.max_lag, settings.bound), LagHistogram()
    for decision in pipeline.loop.trace:
        book.on_decision(decision.now, decision.event, decision.commands)
        lags.on_decision(decision.now, decision.event, decision.commands)
    book.settle(conductor.ledger, may_roll_back=False)
    assert book.violations == []
    lags.check_bound(settings.max_lag, settings.bound, clean=False)
    ledger = conductor.ledger
    assert ledger.trained == versions * settings.version_samples
    assert sum(lags.counts.values()) == ledger.trained + ledger.rolled_back
    assert {event.station for event in lost(pipeline)} >= {"trainer", "generator-0", "simulator-0"}
    evaluated = [c for d in pipeline.loop.trace for c in d.commands if isinstance(c, records.SampleEvaluated)]
    for update in KILLED:
        assert len({result.version for result in evaluated if result.name == f"during-{update}"}) <= 1
