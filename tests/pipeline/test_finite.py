"""Numbers that are not finite in whole runs: who gave them is named, nothing is poisoned, every run can be resumed."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pytest
import torch
import yaml
from tests.long import long
from tests.pipeline.runs import LOCKSTEP, config

from polyrhythm.cli.main import main
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.evaluation.episodes import held_out
from polyrhythm.pipeline.persistence.checkpoints import load_policy
from polyrhythm.scheduler.records import DropReason

HERE = "tests.pipeline.test_finite"
DIVERGING = "tests.process.settings:DivergingSettings"
SLIPPERY, GAUSSIAN = (f"tests.process.policies:Slippery{head}Settings" for head in ("", "Gaussian"))
ASYNCHRONOUS = {
    "rollout": {"sharding": "even:2", "generators": 2, "routing": "least_loaded", "segment_steps": 8},
    "batching": {"type": "dynamic", "max_rows": 4, "max_wait_ms": 1},
    "freshness": {"max_lag": 1.5, "on_update": "continue", "sync_interval": 2},
    "training": {"order": "arrival"},
}
REWARD, SHOWN = "environment: reward is not finite", "environment: observation state is not finite"


class Once:
    """How many optimizer steps there are before the one whose loss is infinite."""

    left = 0


def infinite_once(entries):
    loss = -entries.advantage * entries.logprob
    if len(entries.logprob) <= 8:  # the trial before the start
        return loss
    Once.left -= 1
    return loss * torch.inf if Once.left == 0 else loss


def diverging(**settings):
    return {"type": DIVERGING, "id": "CartPole-v1", "max_steps": 40, **settings}


def slippery(**settings):
    return {"type": SLIPPERY, "hidden": 16, **settings}


@pytest.mark.parametrize("changes", [{}, ASYNCHRONOUS], ids=["lockstep", "asynchronous"])
def test_episodes_that_diverge_cost_their_attempts_and_nothing_else(changes, caplog):
    settings = config(env=diverging(), **changes)
    with closing(build_pipeline(RunContext(settings))) as pipeline:
        pipeline.loop.train_until(3)
        ledger, failures = pipeline.loop.conductor.ledger, pipeline.failures
        assert ledger.trained == 3 * settings.training.batch_size * settings.freshness.sync_interval
        assert (ledger.imbalance, ledger.running, ledger.reissuing) == (0, 0, 0)
        assert pipeline.launcher.payloads.in_flight.describe().endswith("blocks free, 0 being written, 0 finished")
        assert all(x.isfinite().all() for x in pipeline.weights.read()[1].values())
    assert set(failures.counts) == {REWARD, SHOWN}
    assert sum(ledger.dropped.values()) > 0
    if not changes:
        assert {reason: 3 * count for reason, count in ledger.dropped.items()} == {
            "environment not finite": sum(failures.counts.values())
        }
    told = f"a sample failed: env.type = {DIVERGING}: reward is not finite (task "
    (line,) = (line for line in caplog.messages if told in line)
    seed = int(line.partition("seed ")[2].partition(",")[0])
    assert seed % 5 == 0
    assert line.endswith("env step 3)")


@pytest.mark.parametrize("field", ["logprob", "value", "actions"])
def test_a_policy_that_slips_now_and_then_is_blamed_row_by_row(field, caplog):
    name, changes = SLIPPERY, {"policy": slippery(field=field, every=300)}
    if field == "actions":  # those of CartPole are whole numbers
        name = GAUSSIAN
        changes = {
            "policy": {"type": name, "field": field, "every": 300},
            "env": {**diverging(reward_of=2**62, shown_of=2**62), "id": "Pendulum-v1"},
        }
    with closing(build_pipeline(RunContext(config(**changes)))) as pipeline:
        pipeline.loop.train_until(2)
        ledger = pipeline.loop.conductor.ledger
    kind = f"policy: {field} is not finite"
    assert pipeline.failures.counts[kind] == 3 * ledger.dropped[DropReason.POLICY_NOT_FINITE] > 0
    assert (ledger.imbalance, ledger.trained) == (0, 20)
    assert f"policy.type = {name}: {field} is not finite (task" in caplog.text
    assert re.search(r"env step \d+, weights of version [01]\)", caplog.text)


def test_a_policy_that_is_never_finite_ends_the_run_with_its_name_and_version():
    settings = config(policy=slippery(every=1), rollout={"max_dropped": 4, "max_attempts": 2})
    reason = (
        r"rollout.max_dropped = 4: [56] samples were dropped after rollout.max_attempts = 2 attempts each "
        r"\([56] x policy not finite\); the last failure: policy: logprob is not finite "
        r"\(task .*, seed \d+, env step 0, weights of version 0\); correct the policy, then resume the run; "
        r"if its weights have diverged, begin another run with a lower learning rate"
    )
    with closing(build_pipeline(RunContext(settings))) as pipeline, pytest.raises(RunHalted, match=reason):
        pipeline.loop.train_until(1)


def test_evaluation_episodes_that_fail_are_reported(caplog):
    episodes = held_out(20, 1, 1, greedy=True)
    bad = sum(episode.seed % 5 == 0 or episode.seed % 7 == 0 for episode in episodes)
    assert 0 < bad < 20
    with closing(build_pipeline(RunContext(config(env=diverging()), trainer=False))) as pipeline:
        results = pipeline.evaluate("before", episodes)
    assert len(results) == 20 - bad
    assert f"evaluation before: {bad} of 20 episodes were dropped and are missing in its result" in caplog.text
    with closing(build_pipeline(RunContext(config(policy=slippery(every=1)), trainer=False))) as pipeline:
        words = rf"every episode .* policy.type = {SLIPPERY}: logprob is not finite \(.*version 0\)"
        with pytest.raises(RunHalted, match=words):
            pipeline.evaluate("before", held_out(3, 1, 1, greedy=True))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("value", r"value \[6, 1\] of torch.float32, expected \[6\] of floating"),
        ("actions", r"actions \[6, 1, 1, 1\] of"),
    ],
)
def test_an_answer_of_another_shape_names_policy_and_field(field, words):
    with closing(build_pipeline(RunContext(config(policy=slippery(field=field, extra=True))))) as pipeline:
        said = rf"policy.type = {SLIPPERY}: act returned {words}.*; correct act"
        with pytest.raises(RunHalted, match=said):
            pipeline.loop.train_until(1)


# ---------------------------------------------------------------- resumed


class Recipe:
    """A lock-step run in a folder; every part of it goes on where the one before ended."""

    def __init__(self, folder, **sections):
        self.path, self.folder = folder / "recipe.yaml", folder / "run"
        folder.mkdir()
        training = {**LOCKSTEP["training"], "versions": 4, **sections.pop("training", {})}
        rollout = {**LOCKSTEP["rollout"], "buckets": [8], **sections.pop("rollout", {})}
        self.path.write_text(yaml.safe_dump({**LOCKSTEP, "training": training, "rollout": rollout, **sections}))

    def train(self, *overrides):
        return main(["train", str(self.path), "--out", str(self.folder), *overrides])

    def result(self):
        """Weights, ledger, and the updates in the metrics."""
        ledger = json.loads((self.folder / "summary.json").read_text())["ledger"]
        steps = [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return load_policy(self.folder)[1], ledger, steps


@long(3, "a run in four parts")
def test_a_run_that_too_many_failures_ended_goes_on_as_one_that_was_never_ended(tmp_path, capsys):
    """In one bucket, so to the bit. Each part forgives what the ones before had dropped."""
    whole = Recipe(tmp_path / "whole", env=diverging())
    assert whole.train() == 0
    weights, ledger, steps = whole.result()
    assert ledger["dropped"].keys() == {"environment not finite"}
    cut = Recipe(tmp_path / "cut", env=diverging(), rollout={"max_dropped": 5})
    status, parts = cut.train("shutdown_s=60"), 1
    assert status == 2
    assert "rollout.max_dropped = 5: 6 samples were dropped" in capsys.readouterr().err
    while status == 2:
        status, parts = cut.train("resume=auto", "shutdown_s=60"), parts + 1
    assert status == 0
    assert parts == 1 + sum(ledger["dropped"].values()) // 6
    found, other, seen = cut.result()
    assert other == ledger
    assert seen == steps == list(range(4))
    assert all(torch.equal(found[name], x) for name, x in weights.items())


def test_a_gradient_that_is_not_finite_halts_behind_its_update_and_is_never_met_again(tmp_path, capsys, caplog):
    """Halted and resumed, the run learns to the bit what one learns that skips."""
    loss = {"loss": {"type": f"{HERE}:infinite_once"}}
    results = []
    for setting in ("skip", "halt"):
        Once.left = 7
        training = {"on_nonfinite_gradient": setting}
        recipe = Recipe(tmp_path / setting, algorithm=loss, training=training)
        assert recipe.train("shutdown_s=60") == (2 if setting == "halt" else 0)
        told = capsys.readouterr().err
        if setting == "halt":
            assert "training.on_nonfinite_gradient = halt: 1 of" in told
            assert f"algorithm.loss.type = {HERE}:infinite_once: it gives NaN or infinity" in told
            assert recipe.train("resume=auto") == 0
        else:
            assert "1 optimizer steps were skipped, their gradient is not finite" in caplog.text
        results.append(recipe.result())
        lines = [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]
        assert sum(line.get("train/actor/skipped_steps", 0.0) for line in lines) == 1
        assert {name for line in lines for name, value in line.items() if value is None} <= {
            *("env/success_once", "evaluation/greedy/rate", "evaluation/greedy/low", "evaluation/greedy/high")
        }, "CartPole reports no success; all others are finite"
    (weights, ledger, steps), (found, other, seen) = results
    assert other == ledger
    assert ledger["trained"] == 40
    assert seen == steps == list(range(4))
    assert all(torch.equal(found[name], x) for name, x in weights.items())
