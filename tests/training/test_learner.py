from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.toy import ToyPolicy, algorithm, collect, same, spoiled, training, weights
from torch import Tensor

from polyrhythm.algorithms.advantages import ADVANTAGES
from polyrhythm.algorithms.losses import POLICY_LOSSES
from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.specs import Trajectory
from polyrhythm.training.learner import STEPS, Learner
from polyrhythm.training.steps import Metrics, finish

VARIANTS: list[dict[str, Any]] = [
    {},
    *({"loss": loss} for loss in POLICY_LOSSES if loss != "clip_cov"),
    {"loss": {"type": "clip_cov", "fraction": 1.0, "cov_low": 0.1}},
    {"loss": {"type": "kl_cov", "fraction": 0.2}},
    {"loss": {"type": "gspo", "ratio_to": "proximal"}},
    *({"advantage": advantage, "loss": "decoupled_ppo"} for advantage in ADVANTAGES),
    {"advantage": {"type": "reinforce_plus_plus", "group_baseline": True}, "kl": {"coef": 0.1, "place": "reward"}},
    {"kl": {"coef": 0.1, "estimator": "k2"}},
    {"advantage": "maxrl", "overlong": {"tokens": 1}},
    {"proximal": "interpolate"},
    {"loss": "vanilla", "mismatch_cap": 1.1},
    {"aggregation": "sum_over_constant", "aggregation_constant": 20.0},
    {"aggregation": "episode_mean", "value": {"aggregation": "policy"}},
    {"aggregation": "trajectory_mean", "value": {"aggregation": "policy"}, "reward_level": "action"},
    {"advantage": {"type": "reinforce_plus_plus", "returns": "to_go"}},
    {"rollout_correction": {"weight": "token", "weight_max": 1.1, "normalize": True}},
    {"rollout_correction": {"weight": "trajectory", "reject": "ratio", "reject_above": 1.5, "count_rejected": False}},
    {"rollout_correction": {"reject": "k3", "reject_level": "chunk_step", "reject_above": 0.02}},
    {"loss": "gspo", "logprob_level": "action", "reward_level": "action"},
    {"loss": "topr", "advantage": "v_trace", "reward_level": "action"},
    {"logprob_level": "action", "loss": {"type": "ppo", "dual_clip": 3.0}},
    {"logprob_level": "chunk", "aggregation": "trajectory_mean"},
    {"loss": {"type": "decoupled_ppo", "behave_weight_threshold": 2.0}},
    {"reward_level": "action", "logprob_level": "token", "aggregation": "trajectory_mean"},
]
#: The version that a first update produces; the trajectories are of versions 0 to 3.
NEWEST = 4
SOURCES = {
    "train/actor/policy_loss",
    "train/actor/proximal_approx_kl",
    "train/actor/behav_approx_kl",
    "train/actor/clip_fraction",
    "train/actor/dual_clip_fraction",
    "train/actor/behav_clip_fraction",
    "train/actor/ratio",
    "train/actor/grad_norm",
    "train/actor/entropy_loss",
    "train/actor/average_version",
    "train/critic/value_loss",
    "train/critic/explained_variance",
}


def run(
    settings: dict[str, Any],
    train: dict[str, Any],
    *,
    trajectories: list[Trajectory] | None = None,
    updates: int = 1,
    detach: bool = True,
) -> tuple[ToyPolicy, Metrics]:
    """A policy trained from the same start on trajectories of slightly other weights."""
    per_action = settings.get("reward_level") == "action"
    policy = ToyPolicy(detach=detach, per_action=per_action)
    data = trajectories if trajectories is not None else stale(per_action=per_action)
    learner = Learner(policy, algorithm(**settings), training(**train), total_updates=10, seed=7)
    metrics: Metrics = {}
    for index in range(updates):
        metrics = finish(learner.update(data, index, version=index + NEWEST))
    return policy, metrics


def stale(*, per_action: bool = False) -> list[Trajectory]:
    """Of slightly other weights, two to a group."""
    behaviour = ToyPolicy(per_action=per_action)
    with torch.no_grad():
        behaviour.logits.weight.add_(0.05)
        behaviour.logits.bias[::2].add_(0.2)
    return [replace(t, group=t.group // 2) for t in collect(behaviour)]


#: Its draws depend on the order of samples.
DRAWN = {"loss": {"type": "clip_cov", "fraction": 0.05, "cov_low": 0.0}}


@pytest.mark.parametrize("settings", [*VARIANTS, DRAWN])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_micro_batches_do_not_change_the_update(settings: dict[str, Any], micro: int) -> None:
    whole, a = run(settings, {"epochs": 2, "minibatch_steps": 5})
    cut, b = run(settings, {"epochs": 2, "minibatch_steps": 5, "micro_batch_steps": micro})
    for name, x in whole.state_dict().items():
        torch.testing.assert_close(cut.state_dict()[name], x, atol=1e-7, rtol=1e-6)
    assert a == pytest.approx(b, rel=1e-4, abs=1e-6)


def test_forward_passes_never_exceed_the_micro_batch() -> None:
    policy, _ = run({"proximal": "recompute"}, {"minibatch_steps": 7, "micro_batch_steps": 3})
    assert max(policy.rows_seen) == 3
    assert sum(policy.rows_seen) == 2 * 14 + 2, "recomputed, trained; and the values at two cut ends"


@pytest.mark.parametrize("settings", VARIANTS)
def test_masked_entries_have_no_effect(settings: dict[str, Any]) -> None:
    data = stale(per_action=settings.get("reward_level") == "action")
    assert not all(t.valid.all() for t in data)
    clean, a = run(settings, {"minibatch_steps": 5}, trajectories=data)
    dirty, b = run(settings, {"minibatch_steps": 5}, trajectories=[spoiled(t) for t in data])
    assert same(weights(clean), weights(dirty))
    assert a == b


@pytest.mark.parametrize("settings", VARIANTS)
def test_order_of_samples_is_only_rounding(settings: dict[str, Any]) -> None:
    data = stale(per_action=settings.get("reward_level") == "action")
    there, _ = run(settings, {"epochs": 2}, trajectories=data)
    back, _ = run(settings, {"epochs": 2}, trajectories=data[::-1])
    for name, x in there.state_dict().items():
        torch.testing.assert_close(back.state_dict()[name], x, atol=1e-5, rtol=1e-4)


def test_same_seed_same_bits_whatever_the_global_random_state() -> None:
    first, a = run({}, {"epochs": 2, "minibatch_steps": 4}, updates=3)
    torch.manual_seed(123)
    np.random.seed(123)
    second, b = run({}, {"epochs": 2, "minibatch_steps": 4}, updates=3)
    assert same(weights(first), weights(second))
    assert a == b


def test_one_optimizer_step_per_next() -> None:
    policy = ToyPolicy()
    learner = Learner(policy, algorithm(), training(epochs=3, minibatch_steps=5), total_updates=1, seed=0)
    steps, seen = learner.update(stale(), 0), [weights(policy)]
    seen.extend(weights(policy) for _ in steps)
    assert len(seen) == 1 + 3 * 3
    assert not any(same(a, b) for a, b in itertools.pairwise(seen))
    assert learner.updates == 1


def test_metrics_have_the_sources_names_and_sense() -> None:
    loss = {"type": "decoupled_ppo", "dual_clip": 3.0, "behave_weight_threshold": 2.0}
    _, metrics = run({"loss": loss, "proximal": "recompute"}, {"epochs": 1})
    assert set(metrics) == SOURCES | {"train/actor/lr", STEPS}
    assert metrics[STEPS] == 1
    assert metrics["train/actor/ratio"] == pytest.approx(1.0)
    assert metrics["train/actor/proximal_approx_kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["train/actor/behav_approx_kl"] > 1e-4
    assert 0 < metrics["train/actor/entropy_loss"] < np.log(4)
    assert metrics["train/critic/explained_variance"] < 1
    assert metrics["train/actor/average_version"] == pytest.approx((0 * 4 + 1 + 2 * 6 + 3 * 3) / 14)


def test_decoupled_is_ppo_without_staleness() -> None:
    """On the first mini-batch of fresh samples, to rounding of the behaviour's float32 log-probs."""
    data = collect(ToyPolicy())
    ppo, _ = run({}, {}, trajectories=data)
    loss = {"type": "decoupled_ppo", "behave_weight_threshold": 2.0}
    decoupled, _ = run({"loss": loss, "proximal": "recompute"}, {}, trajectories=data)
    for name, x in ppo.state_dict().items():
        torch.testing.assert_close(decoupled.state_dict()[name], x, atol=1e-5, rtol=1e-4)


#: Parts of the objective, written out: of logπ_θ and logπ_b [N,C,A], A and logπ_ref.
PLAIN: list[tuple[dict[str, Any], Callable[..., Tensor]]] = [
    (
        {"proximal": "behavior"},
        lambda new, old, a, ref: -torch.minimum((new - old).exp() * a, (new - old).exp().clamp(0.8, 1.2) * a),
    ),
    (
        {"mismatch_cap": 1.1},
        lambda new, old, a, ref: -(new.detach() - old).exp().clamp(max=1.1) * (new - new.detach()).exp() * a,
    ),
    (
        {"loss": "vanilla", "kl": {"coef": 0.3, "estimator": "k2"}},
        lambda new, old, a, ref: -new * a + 0.15 * (new - ref) ** 2,
    ),
    (
        {"loss": "tis", "kl": {"coef": 0.3}},
        lambda new, old, a, ref: (
            -(new.detach() - old).exp().clamp(max=2.0) * new * a + 0.3 * ((ref - new).exp() - 1 - (ref - new))
        ),
    ),
]


@pytest.mark.parametrize(("changes", "loss_of"), PLAIN)
def test_gradient_is_the_plain_formula(changes: dict[str, Any], loss_of: Callable[..., Tensor]) -> None:
    """One step at token level against the loss written out here, over all decisions at once."""
    data, policy, other = stale(), ToyPolicy(detach=False), ToyPolicy(seed=5)
    plain = copy.deepcopy(policy)
    settings = {"gamma": 0.9, "gae_lambda": 0.8, "value": {"coef": 0.5}, "entropy_coef": 0.1} | changes
    learner = Learner(policy, algorithm(**settings), training(optimizer={"grad_clip": None}), total_updates=1, seed=0)
    if "kl" in settings:
        learner.load_state_dict(learner.state_dict() | {"reference": other.state_dict()})
    next(learner.update(data, 0))
    seen = [p.grad.clone() for p in policy.parameters() if p.grad is not None]

    advantages, returns = [], []
    for t in data:
        last = float(plain.value({"x": torch.from_numpy(t.obs["x"][-1:])})[0].detach()) if t.truncated else 0.0
        values, chain = [*t.value.tolist(), last], 0.0
        mine = []
        for k in reversed(range(t.steps)):
            delta = float(t.rewards[k].sum()) + 0.9 * values[k + 1] - values[k]
            chain = delta + 0.9 * 0.8 * chain
            mine.insert(0, chain)
        advantages += mine
        returns += [a + v for a, v in zip(mine, values, strict=False)]
    adv, target = torch.tensor(advantages, dtype=torch.float64), torch.tensor(returns, dtype=torch.float64)
    adv = (adv - adv.mean()) / (adv.std(correction=0) + 1e-8)
    obs = {"x": torch.from_numpy(np.concatenate([t.obs["x"][:-1] for t in data]))}
    tokens = torch.from_numpy(np.concatenate([t.forward_inputs["tokens"] for t in data]))
    old = torch.from_numpy(np.concatenate([t.logprob for t in data]))
    mask = torch.from_numpy(np.concatenate([t.valid for t in data])).unsqueeze(-1).expand_as(old)
    e = plain.evaluate(obs, {"tokens": tokens})
    reference = other.evaluate(obs, {"tokens": tokens}).logprob.detach()
    losses = loss_of(e.logprob, old, adv.reshape(-1, 1, 1), reference)
    loss = losses[mask].mean() + 0.5 * (0.5 * (e.value - target) ** 2).mean() - 0.1 * e.entropy[mask].mean()
    loss.backward()
    for got, p in zip(seen, plain.parameters(), strict=True):
        torch.testing.assert_close(got, p.grad, atol=1e-6, rtol=1e-5)


def test_training_raises_the_probability_of_what_is_rewarded() -> None:
    """Reward counts tokens that are 0; on-policy updates make them likely."""
    policy = ToyPolicy()
    learner = Learner(policy, algorithm(), training(epochs=4, minibatch_steps=32), total_updates=30, seed=0)

    def share_of_zeros() -> float:
        return float(np.concatenate([t.actions == 0 for t in collect(policy, (20,) * 4, seed=999)]).mean())

    before = share_of_zeros()
    for index in range(30):
        finish(learner.update(collect(policy, (8,) * 8, seed=index), index))
    assert before < 0.5
    assert share_of_zeros() > before + 0.3


def test_one_step_lowers_the_surrogate() -> None:
    data, policy = stale(), ToyPolicy()
    settings = training(optimizer={"lr": 1e-3}, epochs=1)
    objective = algorithm(entropy_coef=0.0, value={"coef": 0.0}, proximal="behavior")
    learner = Learner(policy, objective, settings, total_updates=2, seed=0)
    losses = [finish(learner.update(data, index))["train/actor/policy_loss"] for index in range(3)]
    assert losses[2] < losses[1] < losses[0]


def test_critic_warmup_leaves_the_policy_alone_to_the_bit() -> None:
    policy = ToyPolicy(detach=True)
    train = training(critic_warmup_updates=2, epochs=2, optimizer={"lr": 0.01, "weight_decay": 0.5})
    learner = Learner(policy, algorithm(proximal="behavior"), train, total_updates=4, seed=0)
    start = weights(policy)
    for index in range(2):
        metrics = finish(learner.update(stale(), index))
        assert metrics["train/actor/approx_kl"] > 0  # reported although not trained
    after = weights(policy)
    critic = {name for name in start if name.startswith("critic")}
    assert same({n: start[n] for n in start.keys() - critic}, after)
    assert not any(torch.equal(start[n], after[n]) for n in critic)
    finish(learner.update(stale(), 2))
    assert not same({n: start[n] for n in start.keys() - critic}, weights(policy))


def test_learning_rate_falls_linearly_to_its_fraction() -> None:
    policy = ToyPolicy()
    train = training(optimizer={"lr": 0.01, "lr_final_fraction": 0.4})
    learner = Learner(policy, algorithm(), train, total_updates=4, seed=0)
    rates = [finish(learner.update(stale(), index))["train/actor/lr"] for index in range(4)]
    assert rates == pytest.approx([0.01, 0.008, 0.006, 0.004])


def test_learning_rate_rises_linearly_in_the_warm_up() -> None:
    """So is the first step as short as its rate; Adam would make it as long as the full one, whatever the gradient."""
    policy = ToyPolicy()
    train = training(optimizer={"lr": 0.01, "warmup_updates": 4, "lr_final_fraction": 0.4})
    learner = Learner(policy, algorithm(), train, total_updates=4, seed=0)
    start = weights(policy)
    first = finish(learner.update(stale(), 0))["train/actor/lr"]
    assert max(float((x - start[name]).abs().max()) for name, x in weights(policy).items()) == pytest.approx(
        first, rel=1e-3
    )
    rates = [first] + [finish(learner.update(stale(), index))["train/actor/lr"] for index in range(1, 5)]
    assert rates == pytest.approx([0.0025, 0.004, 0.0045, 0.004, 0.004])


def test_the_value_has_a_learning_rate_of_its_own() -> None:
    """Adam's first step is as long as the rate, whatever the gradient."""
    policy = ToyPolicy()
    rates = {"lr": 1e-4, "value_lr": 1e-3, "lr_final_fraction": 0.5}
    learner = Learner(policy, algorithm(), training(optimizer=rates), total_updates=2, seed=0)
    start = weights(policy)
    finish(learner.update(stale(), 1))  # the second update, at half of both rates
    for name, x in weights(policy).items():
        rate = 5e-4 if name.startswith("critic") else 5e-5
        assert float((x - start[name]).abs().max()) == pytest.approx(rate, rel=1e-3)


def test_a_rate_for_the_value_needs_a_critic() -> None:
    policy = ToyPolicy()
    policy.value_head = policy.critic
    del policy.critic
    with pytest.raises(ValueError, match="no module `critic`"):
        Learner(policy, algorithm(), training(optimizer={"value_lr": 1e-3}), total_updates=2, seed=0)


def test_restored_learner_goes_on_bit_for_bit() -> None:
    data = stale()
    train = training(epochs=2, minibatch_steps=5, optimizer={"lr": 0.01, "value_lr": 0.03, "weight_decay": 0.1})
    first = Learner(ToyPolicy(), algorithm(), train, total_updates=4, seed=3)
    for index in range(2):
        finish(first.update(data, index))
    state = copy.deepcopy(first.state_dict())
    second = Learner(ToyPolicy(seed=9), algorithm(), train, total_updates=4, seed=3)
    second.load_state_dict(state)
    assert second.updates == 2
    assert finish(first.update(data, 2)) == finish(second.update(data, 2))
    assert same(first.policy.state_dict(), second.policy.state_dict())


def test_a_reference_policy_is_what_the_first_update_began_with_also_after_a_restart() -> None:
    data, settings = stale(), algorithm(kl={"coef": 1.0, "estimator": "k2"})
    first = Learner(ToyPolicy(), settings, training(), total_updates=4, seed=3)
    assert finish(first.update(data, 0))["train/actor/reference_kl"] == pytest.approx(0.0, abs=1e-12)
    assert finish(first.update(data, 1))["train/actor/reference_kl"] > 0
    state = copy.deepcopy(first.state_dict())
    assert same(state["reference"], weights(ToyPolicy()))
    second = Learner(ToyPolicy(seed=9), settings, training(), total_updates=4, seed=3)
    second.load_state_dict(state)
    assert finish(first.update(data, 2)) == finish(second.update(data, 2))
    assert same(first.policy.state_dict(), second.policy.state_dict())


def test_the_distance_to_the_reference_holds_the_policy_back() -> None:
    def distance(coef: float) -> float:
        settings = algorithm(kl={"coef": coef, "estimator": "k2"}, entropy_coef=0.0, value={"coef": 0.0})
        learner = Learner(ToyPolicy(), settings, training(), total_updates=6, seed=3)
        return [finish(learner.update(stale(), index))["train/actor/reference_kl"] for index in range(6)][-1]

    assert distance(10.0) < 0.2 * distance(1e-6)


@pytest.mark.parametrize("advantage", ["gae", "v_trace"])
def test_no_forward_pass_of_any_policy_exceeds_the_micro_batch(advantage: str) -> None:
    settings = algorithm(kl={"coef": 0.1}, advantage=advantage, loss="decoupled_ppo", bootstrap="always")
    train = training(minibatch_steps=7, micro_batch_steps=2)
    learner = Learner(ToyPolicy(), settings, train, total_updates=4, seed=3)
    finish(learner.update(stale(), 0))
    seen = {"trained": learner.policy, "reference": learner.reference}
    for policy in seen.values():
        assert isinstance(policy, ToyPolicy)
        assert max(policy.rows_seen) == 2


def test_a_step_whose_ratio_left_its_bounds_is_skipped() -> None:
    """The first step's ratio is 1; a huge learning rate takes the second's out of any bound."""
    train = training(epochs=3, optimizer={"lr": 1.0})
    policy = ToyPolicy()
    learner = Learner(policy, algorithm(early_stop_ratio=1.05), train, total_updates=4, seed=3)
    steps = learner.update(stale(), 0)
    next(steps)
    after_one = weights(policy)
    metrics = finish(steps)
    assert metrics["train/actor/early_stopped"] == pytest.approx(2 / 3)
    assert same(after_one, weights(policy))


def test_an_update_ends_once_the_policy_has_moved_far() -> None:
    """At a huge learning rate the second step finds a KL above any bound, and is the last."""
    huge = {"lr": 1.0}
    _, whole = run({}, {"epochs": 4, "optimizer": huge})
    _, cut = run({}, {"epochs": 4, "optimizer": huge, "max_kl": 0.02})
    _, small = run({}, {"epochs": 4, "optimizer": {"lr": 1e-5}, "max_kl": 0.02})
    assert (whole[STEPS], cut[STEPS], small[STEPS]) == (4, 2, 4)


@pytest.mark.parametrize("proximal", ["behavior", "interpolate"])
def test_the_age_of_samples_ends_no_update(proximal: str) -> None:
    """The KL from the policy that acted, or from one between it and the trained one, has the samples' age in it."""
    settings = algorithm(proximal=proximal), training(epochs=3, max_kl=1e-9)
    learner = Learner(ToyPolicy(), *settings, total_updates=8, seed=3)
    assert finish(learner.update(stale(), 3, version=NEWEST))[STEPS] == 3


@pytest.mark.parametrize(("interval", "before"), [(1, 0), (4, 0), (4, 3)])
def test_interpolation_is_off_by_what_is_left_to_the_recomputed_policy(interval: int, before: int) -> None:
    """(1 − α)·|logπ_θ − logπ_b| at the first step, where π_θ is what recomputing would give. α counts updates: of
    `interval` in a version, `before` came before this one."""
    data = stale()
    policy, objective = ToyPolicy(), algorithm(proximal="interpolate")
    learner = Learner(policy, objective, training(epochs=2), total_updates=32, seed=3, sync_interval=interval)
    metrics = finish(learner.update(data, (NEWEST - 1) * interval + before, version=NEWEST))
    fresh, total, count = ToyPolicy(), 0.0, 0
    for t in data:
        inputs = {"tokens": torch.from_numpy(t.forward_inputs["tokens"])}
        now = fresh.evaluate({"x": torch.from_numpy(t.obs["x"][:-1])}, inputs).logprob.detach().numpy()
        for k in range(t.steps):
            age = (NEWEST - 1 - int(t.version[k])) * interval + before + 1
            alpha = (age - 1) / age
            for c in range(t.valid.shape[1]):
                if t.valid[k, c]:
                    total += float((1 - alpha) * np.abs(now[k, c] - t.logprob[k, c]).sum())
                    count += t.logprob.shape[2]
    assert metrics["train/actor/interpolation_error"] == pytest.approx(total / count, rel=1e-5)


class LatePolicy(ToyPolicy):
    """Its values are computed by the trainer."""

    values_late = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        self.calls.append("evaluate")
        return super().evaluate(obs, forward_inputs)


class LateAlonePolicy(LatePolicy):
    """It has a pass for values alone."""

    def late_values(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Tensor:
        self.calls.append("late_values")
        return self.value(obs)


def test_late_values_take_a_pass_of_their_own_where_log_probs_are_not_recomputed() -> None:
    found = {}
    for made, proximal in itertools.product((LatePolicy, LateAlonePolicy), ("behavior", "recompute")):
        policy = made()
        learner = Learner(policy, algorithm(proximal=proximal), training(), total_updates=8, seed=3)
        metrics = finish(learner.update(stale(), 0, version=NEWEST))
        found[made, proximal] = (policy.calls[0], policy.calls.count("evaluate"), metrics)
    assert found[LateAlonePolicy, "behavior"][:2] == ("late_values", found[LatePolicy, "behavior"][1] - 1)
    assert found[LateAlonePolicy, "behavior"][2] == found[LatePolicy, "behavior"][2]
    assert found[LateAlonePolicy, "recompute"] == found[LatePolicy, "recompute"]


def test_mismatch_with_lag_is_that_of_the_chunk_steps_of_the_trainers_own_weights() -> None:
    """Those of version 3 are off by 0.1, the others by their staleness."""
    own = {t.ticket: t.version == 3 for t in collect(ToyPolicy())}
    data = [
        replace(t, logprob=np.where(own[t.ticket][:, None, None], t.logprob + 0.1, t.logprob - 1).astype(np.float32))
        for t in collect(ToyPolicy())
    ]
    assert len({v for t in data for v in t.version.tolist()}) > 1

    def mismatch(own_version: int | None, **settings: Any) -> float | None:
        learner = Learner(ToyPolicy(), algorithm(**settings), training(), total_updates=8, seed=3)
        found = finish(learner.update(data, 0, version=4, own_version=own_version))
        return found.get("train/actor/mismatch_kl")

    assert mismatch(3) == pytest.approx(np.expm1(-0.1) + 0.1, rel=1e-4)
    assert mismatch(9) is None, "no sample is of these weights"
    assert mismatch(None) is None
    assert mismatch(3, proximal="behavior") is None, "log-probs are not recomputed"


def test_mismatch_is_that_of_single_tokens_where_those_of_new_weights_keep_nothing_of_old_ones() -> None:
    """Messages that got version 3 behind their first token: later ones are off by 0.1, the first by its staleness."""
    data = []
    for t in collect(ToyPolicy()):
        newer = np.repeat(np.arange(t.valid.shape[1])[None] > 0, t.steps, 0).astype(np.int32)
        logprob = np.where(newer[..., None] > 0, t.logprob + 0.1, t.logprob - 1).astype(np.float32)
        data.append(replace(t, version=np.full_like(t.version, 2), newer=newer, logprob=logprob))

    def mismatch(*, token_versions: bool, **settings: Any) -> float | None:
        made = algorithm(**settings)
        learner = Learner(ToyPolicy(), made, training(), total_updates=8, seed=3, token_versions=token_versions)
        return finish(learner.update(data, 0, version=4, own_version=3)).get("train/actor/mismatch_kl")

    for level, entries in (("token", 1), ("action", data[0].logprob.shape[2])):
        found = mismatch(token_versions=True, logprob_level=level)
        assert found == pytest.approx(np.expm1(-0.1 * entries) + 0.1 * entries, rel=1e-4), level
    assert mismatch(token_versions=False) is None, "no message is wholly of version 3"
    assert mismatch(token_versions=True, logprob_level="chunk", proximal="recompute") is None


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_samples_without_advantages_are_those_of_groups_that_earned_the_same(level: str) -> None:
    data = stale(per_action=level == "action")
    equal = [replace(t, rewards=np.zeros_like(t.rewards)) for t in data]
    for advantage in ("grpo", "maxrl"):
        settings = {"advantage": advantage, "value": {"coef": 0.0}, "reward_level": level}
        for given, share in ((data, 0.0), (equal, 1.0), ([*equal[:2], *data[2:]], 0.5)):
            _, found = run(settings, {}, trajectories=given)
            assert found["train/actor/zero_advantage_fraction"] == share
    assert "train/actor/zero_advantage_fraction" not in run({}, {})[1]


def test_mismatch_weights_are_those_of_the_two_engines_capped() -> None:
    data = stale()
    _, plain = run({"loss": "vanilla"}, {}, trajectories=data)
    _, weighed = run({"loss": "vanilla", "mismatch_cap": 1.01}, {}, trajectories=data)
    assert "train/actor/mismatch_weight" not in plain
    assert 0.5 < weighed["train/actor/mismatch_weight"] <= 1.01
    assert weighed["train/actor/policy_loss"] != pytest.approx(plain["train/actor/policy_loss"], rel=1e-3)


def test_a_sum_over_a_constant_is_the_mean_times_entries_over_the_constant() -> None:
    data, gradients = stale(), []
    entries = sum(int(t.valid.sum()) for t in data) * data[0].logprob.shape[2]
    for objective in ({}, {"aggregation": "sum_over_constant", "aggregation_constant": 4.0 * entries}):
        policy = ToyPolicy()
        settings = algorithm(value={"coef": 0.0}, entropy_coef=0.0, **objective)
        learner = Learner(policy, settings, training(optimizer={"grad_clip": None}), total_updates=1, seed=0)
        next(learner.update(data, 0))
        gradients.append(policy.logits.weight.grad)
    torch.testing.assert_close(4.0 * gradients[1], gradients[0])


@pytest.mark.parametrize(
    "settings", [{}, {"kl": {"coef": 0.1}, "advantage": "v_trace", "loss": "tis"}, {"loss": "gspo"}]
)
def test_what_autograd_keeps_is_bounded_by_the_micro_batch(settings: dict[str, Any]) -> None:
    """Bytes saved for backward at a time: twice the micro-batch twice the bytes, twice the samples no more."""

    def most(samples: int, micro: int) -> int:
        kept = largest = 0

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += x.nbytes
            return x

        def give(x: torch.Tensor) -> torch.Tensor:
            nonlocal kept, largest
            largest, kept = max(largest, kept), 0  # a backward pass has begun
            return x

        learner = Learner(
            ToyPolicy(), algorithm(**settings), training(micro_batch_steps=micro), total_updates=1, seed=0
        )
        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            finish(learner.update(collect(ToyPolicy(), (8,) * samples), 0))
        return largest

    parameters = sum(p.nbytes for p in ToyPolicy().parameters())
    assert most(16, 4) <= most(4, 4) + parameters
    assert most(4, 16) > 3 * (most(4, 4) - parameters)
