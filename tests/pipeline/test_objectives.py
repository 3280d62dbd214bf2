"""Every objective in a whole run, and a user's own: tried before the start, used in the run, named when it fails."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from tests.long import long
from tests.pipeline.runs import config

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.losses import POLICY_LOSSES, LossOutput
from polyrhythm.errors import ConfigError, RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.processes import incarnation

HERE = "tests.pipeline.test_objectives"
STALE = {
    "batching": {"type": "dynamic"},
    "freshness": {"max_lag": 2, "on_update": "continue"},
    "groups": {"size": 2},
    "training": {"order": "arrival"},
}


def trained(**changes):
    """The weights after the run, and the updates' metrics."""
    checked = validate_run(config(**changes))
    reports = []

    class Reports(Observer):
        def on_report(self, now, report):
            if report.topic == "update":
                reports.append(report.values)

    with closing(build_pipeline(RunContext(checked.config))) as pipeline:
        pipeline.loop.add_observers(Reports())
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
    return LossOutput(entries.logprob, {"mean": entries.logprob.mean()})


def breaking(entries):
    raise RuntimeError("the formula has a hole")


def breaking_later(entries):
    if len(entries.logprob) > 8:  # the trial has fewer
        raise RuntimeError("the formula has a hole")
    return plainest(entries)


def looking(entries):
    return plainest(entries) * (entries.proximal - entries.behavior).exp()


def looking_back(samples):
    return samples.rewards * samples.log_ratio.exp()


def remembering(entries):
    return LossOutput(plainest(entries), {"moved": entries.logprob * 2})


def shadowing(entries):
    return LossOutput(plainest(entries), {"ratio": entries.behavior})


def moody(entries):
    return plainest(entries) * torch.rand_like(entries.advantage)


def grabbing(entries):
    entries.advantage.mul_(0.5)
    return plainest(entries)


def leaving(entries):
    raise SystemExit(3)


def listing(entries):
    return LossOutput(plainest(entries), [1.0])


def wanting(entries, *, slope):
    return plainest(entries) * slope


def counting(samples):
    return samples.valid.long()


def shrinking(entries):
    return plainest(entries) if len(entries.logprob) <= 8 else plainest(entries).mean()


def no_advantage(samples):
    return samples.bootstrap


def with_loss(name, **settings):
    return {"algorithm": {"loss": {"type": f"{HERE}:{name}", **({"settings": settings} if settings else {})}}}


def with_advantage(name):
    return {"algorithm": {"advantage": {"type": f"{HERE}:{name}"}}}


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_every_loss_trains_on_stale_samples(loss):
    start = validate_run(config(**STALE)).policy.state_dict()
    weights, reports = trained(**STALE, algorithm={"loss": loss})
    assert len(reports) == 3
    assert all(x.isfinite().all() for x in weights.values())
    assert not any(torch.equal(x, start[name]) for name, x in weights.items())
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
    """Its advantages are all multiplied with gamma: unwhitened, so is the loss of the first step."""
    found = []
    for gamma in (1.0, 0.5):
        changes = with_advantage("remaining_reward")
        changes["algorithm"] |= {"gamma": gamma, "normalize_advantage": False, "loss": "vanilla"}
        _, reports = trained(**changes, training={"epochs": 1, "minibatch_steps": 0})
        found.append(reports[0]["train/actor/policy_loss"])
    assert found[1] == pytest.approx(0.5 * found[0])


REFUSED = [
    (
        with_loss("of_one_entry"),
        "it raised ValueError: .* returned a loss \\[\\]; return one number per entry, \\[5, 1, 1\\]",
    ),
    (with_loss("of_nothing"), "it returned NoneType; return the loss per entry, or losses.LossOutput"),
    (with_loss("infinite"), "its loss has NaN or infinity for ordinary entries; check the formula"),
    (with_loss("constant"), "its loss does not depend on entries.logprob; nothing would be learned"),
    (with_loss("mislabelled"), "its metric mean is a tensor \\[\\]; expected a tensor"),
    (
        with_loss("breaking"),
        "it raised RuntimeError: the formula has a hole .*test_objectives.py, line \\d+.; fix it there",
    ),
    (with_loss("looking"), "it reads entries.proximal; set algorithm.loss.uses_proximal true"),
    (with_advantage("looking_back"), "it reads samples.log_ratio; set algorithm.advantage.uses_proximal true"),
    (with_loss("remembering"), "its metric moved has a gradient; detach it"),
    (with_loss("shadowing"), "its metric ratio has the name of one of ours; rename it"),
    (with_loss("moody"), "not deterministic: equal inputs, different outputs; use only its input"),
    (with_loss("grabbing"), "it modifies its input; work on a copy"),
    (with_loss("leaving"), "it raised SystemExit: 3 "),
    (with_loss("listing"), "its metrics are .1.0.; give a dict, name -> tensor"),
    (with_advantage("counting"), "its advantages is of torch.int64; expected floating-point numbers"),
    (with_advantage("no_advantage"), "its advantages is a tensor \\[2\\]; expected a tensor \\[5\\]"),
    (with_advantage("of_nothing"), "it returned NoneType; return the advantages, or advantages.Advantages"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_nonsense_of_ones_own_is_refused_before_the_start(changes, words):
    with pytest.raises(ConfigError, match=rf"^algorithm\.(loss|advantage)\.type = {HERE}:\w+: {words}"):
        validate_run(config(**changes))


UNKNOWN = [
    ({"loss": "no.such:loss"}, r"algorithm.loss.type = no.such:loss: .*cannot be imported"),
    ({"loss": "math:pi"}, r"algorithm.loss.type = math:pi: it is float; name a function"),
    ({"loss": "builtins:max"}, r"algorithm.loss.type = builtins:max: .*name a function that is written in Python"),
    ({"advantage": "math:loss"}, r"algorithm.advantage.type = math:loss: module math has no loss; name a function"),
    ({"loss": "tests.pipeline.broken:loss"}, r"algorithm.loss.type = .*broken raised RuntimeError: there is no robot"),
    ({"loss": f"{HERE}:wanting"}, r"algorithm.loss.settings.slope = null: .*wanting needs it; give it a value"),
    (
        {"loss": {"type": f"{HERE}:plainest", "settings": {"cap": 1}}},
        r"algorithm.loss.settings.cap = 1: .*plainest takes factor; leave it out",
    ),
]


@pytest.mark.parametrize(("objective", "words"), UNKNOWN)
def test_what_is_not_there_is_refused_before_the_start(objective, words):
    with pytest.raises(ConfigError, match=f"^{words}"):
        validate_run(config(algorithm=objective))


def test_one_that_says_it_looks_at_the_proximal_policy_is_given_it():
    changes = with_loss("looking")
    changes["algorithm"]["loss"]["uses_proximal"] = True
    _, reports = trained(**STALE, **changes)
    assert all("train/actor/proximal_approx_kl" in report for report in reports)
    _, reports = trained(**STALE, algorithm={"loss": "tis"})
    assert not any("train/actor/proximal_approx_kl" in report for report in reports)
    assert max(report["train/actor/approx_kl"] for report in reports) > 0


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=long(4, "two starts of a trainer"))])
def test_a_loss_that_raises_at_run_time_ends_the_run_and_is_named(launcher, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(incarnation, "MAX_SAME_WORDS", 2)  # each takes the start of a trainer
    checked = validate_run(config(**with_loss("breaking_later"), launcher=launcher))
    with (
        closing(build_pipeline(RunContext(checked.config, folder=tmp_path))) as pipeline,
        pytest.raises((RuntimeError, RunHalted), match="the formula has a hole") as failure,
    ):
        pipeline.loop.train_until(1)
    if launcher == "local":
        assert str(failure.value).startswith("trainer failed 2 times in a row in the same way")
        assert caplog.text.count("in breaking_later") == 2, "the traceback of each"


def test_a_loss_whose_shape_changes_later_ends_the_run():
    checked = validate_run(config(**with_loss("shrinking")))
    with (
        closing(build_pipeline(RunContext(checked.config))) as pipeline,
        pytest.raises(ValueError, match=r"shrinking returned a loss \[\]; return one number per entry, \[\d+, 1, 1\]"),
    ):
        pipeline.loop.train_until(1)
