"""Runs whose rewards come from a reward function in stations of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.long import long
from tests.pipeline.runs import config
from tests.pipeline.test_checkpoints import save, stopped, waiting
from tests.plugins.language.test_language_runs import SINGLE, run

from polyrhythm.config.load import load_config
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.standalone import evaluate
from polyrhythm.pipeline.persistence.checkpoints import load_run
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.scheduler.records import StartUpdate
from polyrhythm.scheduler.samples.groups import SampleState
from polyrhythm.training.checkpoint import load_state

UNJUDGED = "env.type=tests.pipeline.scored:UnjudgedSettings"
VERIFIED = (UNJUDGED, "scoring.function=tests.pipeline.scored:verify")
#: A policy that is right now and then.
LEARNED = ("env.terms=[2,2]", "supervised.steps=150", "supervised.batch_size=32", "policy.width=32", "policy.heads=2")


def test_a_verifier_gives_the_same_run_as_the_environments_own_rewards(tmp_path: Path) -> None:
    """Bit for bit, in lock-step."""
    inline = (*SINGLE, *LEARNED, "launcher=inline", "preset=lockstep")
    for name in ("own", "scored"):
        (tmp_path / name).mkdir()
    own, own_updates = run(tmp_path / "own", *inline)
    scored, scored_updates = run(tmp_path / "scored", *inline, *VERIFIED, "scoring.at_a_time=2")
    assert scored["ledger"] == own["ledger"]
    assert sum(line.get("env/return", 0.0) for line in own_updates) > 0, "some answers are right"
    for name in ("env/return", "env/success_once", "train/actor/policy_loss"):
        assert [line.get(name) for line in scored_updates] == [line.get(name) for line in own_updates]
    assert scored["after"] == own["after"]
    assert '"score ' in (tmp_path / "scored" / "trace.json").read_text()
    first, second = (load_state(tmp_path / folder / "policy.pt")["policy"] for folder in ("own", "scored"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@long(15, "scorers in processes; tests/process has shorter runs of them")
def test_processes_score_beside_generation_and_evaluations_are_scored_too(tmp_path: Path) -> None:
    more = ("scoring.processes=2", "scoring.at_a_time=3", "evaluation.every=1", "evaluation.rows=2")
    summary, updates = run(tmp_path, *SINGLE, *LEARNED, *VERIFIED, *more, "launcher=local")
    assert summary["ledger"]["trained"] == 24
    during = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if "evaluation/greedy" in line]
    assert len(during) >= 3
    assert all("env/sample_score" in line for line in updates)
    result = evaluate(tmp_path)
    assert {name: result[name] for name in summary["after"]} == summary["after"]


CARTPOLE = {
    "rollout": {"sharding": "even:2", "generators": 2},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue"},
    "training": {"order": "arrival"},
    "scoring": {"function": "tests.process.rewards:by_seed"},
}


def test_samples_that_were_not_scored_when_a_run_was_saved_are_scored_when_it_goes_on(tmp_path: Path) -> None:
    first = stopped(tmp_path, lambda conductor: conductor.ledger.scoring and conductor.versions.updates, CARTPOLE)
    first.close()
    saved = load_run(save(tmp_path, first))
    before = first.loop.conductor.rollout.samples.values()
    unscored = {sample.ticket.number for sample in before if sample.state is SampleState.SCORING}
    second = build_pipeline(RunContext(config(**CARTPOLE), folder=tmp_path, saved=saved), record=True)
    conductor = second.loop.conductor
    assert unscored <= {sample.ticket.number for sample in conductor.rollout.samples.values() if sample.payload_id}
    second.loop.train_until(3)
    assert (conductor.ledger.imbalance, conductor.ledger.dropped, conductor.ledger.trained) == (0, {}, 30)
    updates = [c for loop in (first, second) for d in loop.loop.trace for c in d.commands if isinstance(c, StartUpdate)]
    assert unscored & {ticket for update in updates for ticket in update.tickets}
    for update in updates:
        starts = [conductor.rollout.admission.start_of(ticket) for ticket in update.tickets]
        assert update.scores == tuple(float(seed % 7) for _, seed in starts)
    assert set(second.launcher.payloads.in_flight.finished()) == waiting(conductor)
    second.close()


def test_a_reward_function_that_never_works_ends_the_run_with_its_words(tmp_path: Path) -> None:
    scoring = {"function": "tests.process.rewards:picky", "options": {"share": 1}}
    pipeline = build_pipeline(
        RunContext(
            config(**{**CARTPOLE, "rollout": {"sharding": "even:2", "max_dropped": 5}, "scoring": scoring}),
            folder=tmp_path,
        )
    )
    with pytest.raises(RunHalted, match=r"after scoring.max_attempts = 3 attempts each.*picky: ValueError: no opinion"):
        pipeline.loop.train_until(3)
    pipeline.close()


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("scoring.function=judge",), "write module:function"),
        (("scoring.function=no_such_module:judge",), "cannot be imported"),
        (("scoring.function=tests.pipeline.scored:verify", "scoring.options.by=2"), "cannot be called with a sample"),
        (("placement.scorers.threads=2",), "there are no scorers"),
    ],
)
def test_what_cannot_score_is_told_before_the_start(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validate_run(load_config("quickstart_lm", ["launcher=inline", *overrides]))
