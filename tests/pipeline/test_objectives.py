"""Every objective in a whole run, and a user's own: tried before the start, used in the run, named when it fails."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from tests.pipeline.runs import config

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.losses import POLICY_LOSSES, Terms
from polyrhythm.errors import ConfigError, PolyrhythmError
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.check import check

HERE = "tests.pipeline.test_objectives"
STALE = {
    "batching": {"type": "dynamic"},
    "freshness": {"max_lag": 2, "on_update": "continue"},
    "groups": {"size": 2},
    "training": {"order": "arrival"},
}


def trained(**changes):
    """The weights after the run, and the updates' figures."""
    checked = check(config(**changes))
    reports = []

    class Reports:
        def decided(self, now, event, commands):
            pass

        def reported(self, now, report):
            if report.topic == "update":
                reports.append(report.values)

    with closing(build_pipeline(checked.config, checked.policy)) as pipeline:
        pipeline.loop.observers.append(Reports())
        pipeline.loop.train_until(checked.config.training.versions)
        weights = {name: x.clone() for name, x in pipeline.weights.read()[1].items()}
    return weights, reports


def plainest(entries, *, factor=1.0):
    return -factor * entries.advantage * entries.logprob


def remaining_reward(samples, *, gamma):
    advantages = torch.zeros_like(samples.rewards)
    for i in range(len(samples.bootstrap)):
        mine = samples.trajectory == i
        advantages[mine] = samples.rewards[mine].flip(0).cumsum(0).flip(0)
    return gamma * advantages


def of_one_entry(entries):
    return entries.logprob.mean()


def of_nothing(entries):
    return None


def infinite(entries):
    return entries.logprob * float("inf")


def constant(entries):
    return entries.advantage


def mislabelled(entries):
    return Terms(entries.logprob, {"mean": entries.logprob.mean()})


def breaking(entries):
    raise RuntimeError("the formula has a hole")


def breaking_later(entries):
    if len(entries.logprob) > 8:  # the trial has fewer
        raise RuntimeError("the formula has a hole")
    return plainest(entries)


def no_advantage(samples):
    return samples.bootstrap


def with_loss(name, **settings):
    return {"algorithm": {"loss": {"type": f"{HERE}:{name}", **({"settings": settings} if settings else {})}}}


def with_advantage(name):
    return {"algorithm": {"advantage": {"type": f"{HERE}:{name}"}}}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_trains_on_stale_samples(loss):
    weights, reports = trained(**STALE, algorithm={"loss": loss})
    assert len(reports) == 3
    assert all(x.isfinite().all() for x in weights.values())
    assert max(report["staleness/lag_max"] for report in reports) > 0


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_every_advantage_trains_with_a_reference_policy(advantage, place):
    objective = {
        "advantage": advantage,
        "loss": "decoupled_ppo",
        "kl": {"coef": 0.1, "estimator": "k2", "place": place},
    }
    weights, reports = trained(**STALE, algorithm=objective)
    assert all(x.isfinite().all() for x in weights.values())
    assert reports[0]["train/actor/reference_kl"] < reports[-1]["train/actor/reference_kl"]


def test_interpolating_trains_and_says_how_far_it_is_off():
    _, reports = trained(**STALE, algorithm={"loss": "decoupled_ppo", "proximal": "interpolate"})
    assert any(report["train/actor/interpolation_error"] > 0 for report in reports)


def test_a_loss_of_ones_own_trains_as_ours_of_the_same_formula():
    ours, _ = trained(algorithm={"loss": "vanilla"})
    theirs, _ = trained(**with_loss("plainest"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    other, _ = trained(**with_loss("plainest", factor=0.5))
    assert not all(torch.equal(ours[name], other[name]) for name in ours)


def test_an_advantage_of_ones_own_trains_and_is_told_gamma():
    ours, _ = trained(algorithm={"gamma": 1.0, "gae_lambda": 1.0})
    theirs, _ = trained(**with_advantage("remaining_reward"))
    assert ours.keys() == theirs.keys()
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)


REFUSED = [
    (with_loss("of_one_entry"), "its loss is a tensor \\[\\]; a tensor \\[5, 1, 1\\] is wanted, one number per entry"),
    (with_loss("of_nothing"), "it returned NoneType; return the loss per entry, or losses.Terms"),
    (with_loss("infinite"), "its loss is not finite for ordinary entries; mend it"),
    (with_loss("constant"), "its loss does not depend on entries.logprob; nothing would be learned"),
    (with_loss("mislabelled"), "its figure mean is a tensor \\[\\]; a tensor"),
    (with_loss("breaking"), "it raised RuntimeError: the formula has a hole .*test_objectives.py, line \\d+.; mend it"),
    (with_advantage("no_advantage"), "its advantages is a tensor \\[2\\]; a tensor \\[5\\] is wanted"),
    (with_advantage("of_nothing"), "it returned NoneType; return the advantages, or advantages.Advantages"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_nonsense_of_ones_own_is_refused_before_the_start(changes, words):
    with pytest.raises(ConfigError, match=rf"^algorithm\.(loss|advantage)\.type = {HERE}:\w+: {words}"):
        check(config(**changes))


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_loss_that_raises_at_run_time_ends_the_run_and_is_named(launcher, tmp_path, caplog):
    checked = check(config(**with_loss("breaking_later"), launcher=launcher))
    with closing(build_pipeline(checked.config, checked.policy, tmp_path)) as pipeline:
        with pytest.raises((RuntimeError, PolyrhythmError)) as failure:
            pipeline.loop.train_until(1)
        assert "the formula has a hole" in str(failure.value) + caplog.text
