"""An update whose samples come in parts has the weights and metrics of one that begins with all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_learner import VARIANTS
from tests.training.toy import FEATURES, ToyPolicy, algorithm, collect, same, training, weights
from torch import Tensor

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.entry_selection import SELECTION_RULES
from polyrhythm.algorithms.losses import POLICY_LOSSES
from polyrhythm.config.streaming import SELECTING, why_whole_objective
from polyrhythm.policies.base import Observations
from polyrhythm.policies.normalizer import ObservationNormalizer
from polyrhythm.specs import ArraySpec, Trajectory
from polyrhythm.training.learner import STEPS, Learner
from polyrhythm.training.steps import Metrics, SampleFeed, Steps, finish

PAGE = Path(__file__).parents[2] / "docs/freshness.md"
LENGTHS = (4, 1, 6, 3, 2, 5, 1, 3, 2, 2, 4, 1)
#: Without what compares or normalises over the update.
FREE: dict[str, Any] = {"advantage": "grpo", "normalize_advantage": False, "value": {"coef": 0.0}}
POLICY_MEAN = {"value": {"aggregation": "policy", "clip": 0.2, "huber": 1.0}, "normalize_advantage": False}
STREAMED: list[dict[str, Any]] = [
    *({**FREE, "loss": loss} for loss in POLICY_LOSSES if loss not in SELECTING),
    *({**FREE, "loss": "tis", "advantage": advantage} for advantage in ADVANTAGES),
    {
        **FREE,
        "advantage": {"type": "reinforce_plus_plus", "group_baseline": True},
        "kl": {"coef": 0.1, "place": "reward"},
    },
    *({**FREE, "proximal": proximal} for proximal in ("recompute", "interpolate", "behavior")),
    {**FREE, "kl": {"coef": 0.1, "estimator": "k2"}, "entropy_coef": 0.0},
    {**FREE, "loss": "vanilla", "mismatch_cap": 1.1},
    {**FREE, "aggregation": "episode_mean"},
    {**FREE, "aggregation": "trajectory_mean", "logprob_level": "chunk"},
    {**FREE, "rollout_correction": {"weight": "token", "weight_max": 1.1}},
    {
        **FREE,
        "rollout_correction": {"weight": "trajectory", "reject": "ratio", "reject_above": 1.5, "count_rejected": False},
    },
    {**FREE, "early_stop_ratio": 1.0001},
    {**POLICY_MEAN, "aggregation": "sum_over_constant", "aggregation_constant": 20.0},
    {**POLICY_MEAN, "aggregation": "episode_mean"},
    {**POLICY_MEAN, "aggregation": "trajectory_mean", "reward_level": "action"},
    {
        **POLICY_MEAN,
        "aggregation": "episode_mean",
        "rollout_correction": {"reject": "ratio", "reject_above": 1.1, "count_rejected": False},
    },
    {
        **POLICY_MEAN,
        "aggregation": "trajectory_mean",
        "rollout_correction": {"reject": "ratio", "reject_level": "trajectory", "reject_above": 1.01},
    },
    {**POLICY_MEAN, "aggregation": "trajectory_mean", "advantage": "v_trace", "loss": "tis"},
]
#: Groups of two as they come; () in the middle: the trainer looks and finds nothing.
SPLITS = [(2,) * 6, (4, 0, 8), (10, 2), (12,), (2, 0, 0, 6, 4)]
MINI_BATCHES = [(12, 1), (4, 3), (6, 2)]


def samples(*, per_action: bool = False) -> list[Trajectory]:
    behaviour = ToyPolicy(per_action=per_action)
    with torch.no_grad():
        behaviour.logits.weight.add_(0.05)
        behaviour.logits.bias[::2].add_(0.2)
    return [replace(t, group=t.group // 2) for t in collect(behaviour, LENGTHS)]


def learner_of(settings: dict[str, Any], m: int = 12, r: int = 1, **train: Any) -> Learner:
    policy = ToyPolicy(detach=False, per_action=settings.get("reward_level") == "action")
    chosen = training(mini_batch_samples=m, require_batches=r, **{"epochs": 2, **train})
    return Learner(policy, algorithm(**settings), chosen, total_updates=10, seed=7)


def in_parts(learner: Learner, data: list[Trajectory], split: tuple[int, ...], index: int = 0) -> Metrics:
    """The update, `next` being called once after each part and then until the end."""
    feed, first = SampleFeed(), 0
    steps: Steps = learner.update_in_parts(feed, index, version=index + 1, own_version=0)
    for count in split:
        if count:
            feed.add(data[first : first + count], more=first + count < len(data))
        first += count
        next(steps)
    return finish(steps)


@pytest.mark.parametrize("settings", STREAMED, ids=str)
def test_a_streamed_update_is_the_whole_one_but_for_rounding(settings: dict[str, Any]) -> None:
    data = samples(per_action=settings.get("reward_level") == "action")
    for m, r in MINI_BATCHES:
        first = learner_of(settings, m, r)
        if why_whole_objective(algorithm(**settings), training(mini_batch_samples=m, require_batches=r)):
            assert r > 1, "one mini-batch streams"
            continue
        expected = [finish(first.update(data, i, version=i + 1, own_version=0)) for i in range(2)]
        for split in SPLITS:
            learner = learner_of(settings, m, r)
            found = [in_parts(learner, data, split, i) for i in range(2)]
            for name, x in first.policy.state_dict().items():
                torch.testing.assert_close(learner.policy.state_dict()[name], x, atol=1e-6, rtol=1e-6)
            for a, b in zip(found, expected, strict=True):
                assert a == pytest.approx(b, rel=1e-4, abs=1e-6)
            assert found[0][STEPS] == 2 * r


def test_what_compares_over_the_update_does_not_stream() -> None:
    """All losses that select; and of the list of variants those that the rule lets through are in the list above."""
    assert set(SELECTION_RULES) == set(SELECTING)
    for settings in VARIANTS:
        said = why_whole_objective(algorithm(**settings), training())
        needs = algorithm(**settings)
        whole = needs.whitens or needs.loss.type in SELECTING or needs.value.aggregation != "policy"
        assert bool(said) == bool(whole), (settings, said)


@pytest.mark.parametrize(
    ("settings", "train", "words"),
    [
        ({}, {}, "normalize_advantage"),
        ({"normalize_advantage": False, "normalize_rewards": True}, {}, "normalize_rewards"),
        (FREE, {"minibatch_steps": 64}, "minibatch_steps = 64"),
        ({**FREE, "loss": "kl_cov"}, {}, "loss.type = kl_cov"),
        ({**FREE, "value": {"coef": 0.5}}, {}, "normalisers of their own"),
        ({**FREE, "rollout_correction": {"weight": "token", "normalize": True}}, {}, "rollout_correction.normalize"),
        (
            {
                **POLICY_MEAN,
                "aggregation": "trajectory_mean",
                "rollout_correction": {"reject": "ratio", "reject_above": 1.5, "count_rejected": False},
            },
            {},
            "normalisers of their own",
        ),
        ({**FREE, "loss": "json:loads"}, {}, "json:loads may compare"),
        (FREE, {"require_batches": 2}, "proximal = recompute with training.require_batches > 1"),
        ({**FREE, "proximal": "behavior", "aggregation": "episode_mean"}, {"require_batches": 2}, "episode_mean"),
        ({**FREE, "proximal": "behavior"}, {"require_batches": 2}, ""),
        ({**FREE, "proximal": "behavior", "advantage": "gae"}, {"require_batches": 2}, "values behind an episode's"),
        (FREE, {}, ""),
    ],
)
def test_the_reason_names_the_setting(settings: dict[str, Any], train: dict[str, Any], words: str) -> None:
    found = why_whole_objective(algorithm(**settings), training(**train))
    assert words in found
    assert bool(words) == bool(found)
    table = PAGE.read_text().partition("## Streaming")[2].partition("\n## ")[0]
    named = [name.rpartition(".")[2] for name in re.findall(r"(?:algorithm|training)\.[a-z_.]+[a-z]", found)]
    assert all(f"{name}" in table for name in named), "the page has the reason"


def test_passes_begin_with_the_first_part_and_weights_change_with_the_last() -> None:
    learner, data, feed = learner_of(FREE, epochs=1), samples(), SampleFeed()
    start, steps = weights(learner.policy), learner.update_in_parts(feed, 0)
    for first in (0, 2, 4, 6, 8, 10):
        feed.add(data[first : first + 2], more=first < 10)
        seen = len(learner.policy.rows_seen)
        next(steps)
        assert len(learner.policy.rows_seen) == seen + 2, "recomputed, and passed over"
        assert same(weights(learner.policy), start)
        assert feed.stepped is False
    next(steps)
    assert feed.stepped
    assert not same(weights(learner.policy), start)


def test_mini_batches_are_stepped_as_they_are_complete() -> None:
    settings = {**FREE, "proximal": "behavior"}
    learner, data, feed = learner_of(settings, 4, 3, epochs=1), samples(), SampleFeed()
    steps = learner.update_in_parts(feed, 0)
    feed.add(data[:4], more=True)
    start = weights(learner.policy)
    for _ in range(2):
        next(steps)
    assert feed.stepped
    assert not same(weights(learner.policy), start), "eight samples are still to come"


def test_an_update_that_is_left_in_the_middle_leaves_no_trace() -> None:
    """A lost trainer, a halted run: the samples train another time."""
    data, expected = samples(), learner_of(FREE)
    finish(expected.update(data, 0, version=1, own_version=0))
    learner, feed = learner_of(FREE), SampleFeed()
    steps = learner.update_in_parts(feed, 0)
    feed.add(data[:6], more=True)
    next(steps)
    steps.close()
    assert learner.updates == 0
    in_parts(learner, data, (6, 6))
    for name, x in expected.policy.state_dict().items():
        torch.testing.assert_close(learner.policy.state_dict()[name], x, atol=1e-6, rtol=1e-6)


def test_a_gradient_that_is_not_finite_in_one_part_changes_nothing() -> None:
    data = samples()
    bad = replace(data[3], obs={"x": data[3].obs["x"] * float("nan")})
    learner = learner_of(FREE, epochs=1)
    start = weights(learner.policy)
    in_parts(learner, [*data[:3], bad, *data[4:]], (4, 4, 4))
    assert same(weights(learner.policy), start)
    assert learner.updates == 1
    assert "obs" in learner.halt


class NormalizingPolicy(ToyPolicy):
    """With statistics of its observations."""

    def __init__(self) -> None:
        super().__init__()
        self.normalizer = ObservationNormalizer({"x": ArraySpec((FEATURES,), "float32")})

    def heads(self, obs: Observations) -> tuple[Tensor, Tensor]:
        return super().heads(self.normalizer(obs))


def test_statistics_of_observations_wait_for_all_samples_once() -> None:
    def made() -> Learner:
        chosen = training(mini_batch_samples=12, epochs=2)
        return Learner(NormalizingPolicy(), algorithm(**FREE), chosen, total_updates=10, seed=7)

    data, expected, learner = samples(), made(), made()
    feed = SampleFeed()
    steps = learner.update_in_parts(feed, 0, version=1)
    feed.add(data[:6], more=True)
    next(steps)
    assert not learner.policy.rows_seen, "nothing is passed over"
    feed.add(data[6:], more=False)
    finish(steps)
    finish(expected.update(data, 0, version=1))
    assert same(weights(learner.policy), weights(expected.policy))
    in_parts(learner, data, (4, 4, 4), 1)
    finish(expected.update(data, 1, version=2, own_version=0))
    for name, x in expected.policy.state_dict().items():
        torch.testing.assert_close(learner.policy.state_dict()[name], x, atol=1e-6, rtol=1e-6)
