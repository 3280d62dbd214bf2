"""Generators and trainer that disagree about the log-probs of the same weights are warned about, once."""

from __future__ import annotations

import json
import logging

from tests.pipeline.runs import config
from tests.plugins.language.test_language_runs import SINGLE, SMALL

from polyrhythm.config.load import load_config
from polyrhythm.pipeline.observers.alarms import mismatch_limit
from polyrhythm.pipeline.train import train
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.policies.traits import settings_traits

ENV = {"type": "latency", "step_time": "constant:0ms", "episode_steps": 8, "action_dim": 2}
BROKEN = "tests.pipeline.broken_policies:BrokenSettings"


def mismatches(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["train/actor/mismatch_kl"] for record in records if "train/actor/mismatch_kl" in record]


def test_a_policy_that_disagrees_only_later_is_warned_about_once(tmp_path, caplog):
    settings = config(env=ENV, policy={"type": BROKEN, "defect": "late"}, evaluation={"episodes": 0})
    checked = validate_run(settings)
    (tmp_path / "run").mkdir()
    with caplog.at_level(logging.WARNING):
        train(checked, tmp_path / "run")
    warnings = [record.getMessage() for record in caplog.records if "mismatch_kl" in record.getMessage()]
    assert len(warnings) == 1
    assert "the limit by the policy's tolerance is 5e-05" in warnings[0]
    assert len([found for found in mismatches(tmp_path / "run") if found > 0.1]) >= 1


def test_a_policy_that_agrees_is_not(tmp_path, caplog):
    asynchronous = {"freshness": {"max_lag": 1, "on_update": "continue", "sync_interval": 2}}
    for name, changes in {"lockstep": {}, "async": {**asynchronous, "batching": {"type": "dynamic"}}}.items():
        settings = config(env=ENV, policy={"type": "gaussian"}, evaluation={"episodes": 0}, **changes)
        (tmp_path / name).mkdir()
        with caplog.at_level(logging.WARNING):
            train(validate_run(settings), tmp_path / name)
    assert not [record for record in caplog.records if "mismatch_kl" in record.getMessage()]
    assert len(mismatches(tmp_path / "lockstep")) == 3
    assert max(mismatches(tmp_path / "lockstep")) < 1e-6


def test_tokens_are_compared_by_themselves_where_they_keep_nothing_of_older_weights(tmp_path):
    server = ("policy.engine={type: sglang, url: 'http://127.0.0.1:9'}", "policy.refresh_cache=true")
    for overrides, by_token in {(): False, ("policy.refresh_cache=true",): True, server: False}.items():
        chosen = load_config("quickstart_lm", overrides)
        assert settings_traits(chosen.policy).engine.fresh_cache is by_token, overrides
    tiny = (*SMALL, *SINGLE[1:], "launcher=inline", "freshness.on_update=abort")
    (tmp_path / "run").mkdir()
    train(validate_run(load_config(SINGLE[0], tiny)), tmp_path / "run")
    found = mismatches(tmp_path / "run")
    assert len(found) == 3
    assert max(map(abs, found)) < 1e-9, "log-probs of resumed messages are those of their weights"


def test_the_limit_follows_the_tolerance_and_the_entries_of_a_log_prob():
    policy = validate_run(config(env=ENV, policy={"type": "gaussian", "chunk": 4})).policy
    assert mismatch_limit(config().algorithm, policy) == 0.01**2 / 2
    policy.tolerance = 0.05
    assert mismatch_limit(config().algorithm, policy) == 0.05**2 / 2
    assert mismatch_limit(config(algorithm={"logprob_level": "chunk"}).algorithm, policy) == (0.05 * 8) ** 2 / 2
