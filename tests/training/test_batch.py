from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.toy import CHUNK, ToyPolicy, algorithm, collect

from polyrhythm.algorithms.levels import RewardLevel, reward_mask
from polyrhythm.algorithms.proximal import interpolate
from polyrhythm.training.batch import TrainingBatch, collate, minibatches, send_ahead
from polyrhythm.training.objective import Normalizers, Objective
from polyrhythm.training.ranks import ONE_RANK
from polyrhythm.training.targets import TargetInputs, bootstrap_values, compute_targets, estimate_advantages

CPU = torch.device("cpu")


def test_collate_packs_without_padding() -> None:
    trajectories = collect(ToyPolicy(), (3, 2))
    batch = collate(trajectories)
    assert batch.trajectory.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(batch.obs["x"][3:], torch.from_numpy(trajectories[1].obs["x"][:2]))
    assert torch.equal(batch.final_obs["x"][0], torch.from_numpy(trajectories[0].obs["x"][3]))
    assert batch.version.tolist() == [0, 0, 0, 1, 1]
    assert (batch.terminated.tolist(), batch.truncated.tolist()) == ([True, False], [False, True])


def test_collate_keeps_no_reference_to_the_trajectories_memory() -> None:
    (trajectory,) = collect(ToyPolicy(), (3,))
    batch = collate([trajectory])
    before = batch.obs["x"].clone()
    trajectory.obs["x"][:] = np.nan
    trajectory.logprob[:] = np.nan
    assert torch.equal(batch.obs["x"], before)
    assert batch.logprob.isfinite().all()


def test_collate_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="at least one chunk step"):
        collate([])


def test_minibatches_cover_once_in_even_sizes() -> None:
    cut = minibatches([65], 64, (1, 2, 3))
    assert [len(x) for x in cut] == [33, 32]
    assert sorted(torch.cat(cut).tolist()) == list(range(65))
    assert [len(x) for x in minibatches([7], 0, (0, 0, 0))] == [7]


def test_pieces_come_in_order_each_when_it_is_needed() -> None:
    taken: list[int] = []

    def pieces() -> Iterator[list[torch.Tensor]]:
        for number in range(4):
            taken.append(number)
            yield [torch.full((2,), number)]

    found = []
    for (piece,) in send_ahead(pieces(), CPU, lambda tensors, change: [change(x) for x in tensors]):
        found.append((piece.tolist(), len(taken)))
    assert found == [([0, 0], 1), ([1, 1], 2), ([2, 2], 3), ([3, 3], 4)]


def test_minibatches_follow_their_seed_alone() -> None:
    first = minibatches([50], 10, (1, 2, 3))
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, minibatches([50], 10, (1, 2, 3)), strict=True))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(torch.cat(first), torch.cat(minibatches([50], 10, other)))


def normalizers_of(objective: Objective, targets: TrainingBatch) -> Normalizers:
    """Of all chunk steps as one mini-batch."""
    return objective.normalizers(targets, [torch.arange(len(targets))], ONE_RANK.totals)[0]


def inputs(
    policy: ToyPolicy, micro_batch: int = 0, version: int = 1, reference: ToyPolicy | None = None
) -> TargetInputs:
    return TargetInputs(policy, reference, version, micro_batch, CPU)


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_group_advantages_are_of_whole_returns_at_every_valid_entry(level: RewardLevel) -> None:
    policy = ToyPolicy(per_action=level == "action")
    trajectories = [replace(t, group=7 + i // 2) for i, t in enumerate(collect(policy))]
    batch = collate(trajectories)
    mask = reward_mask(batch.valid, level)
    settings = algorithm(advantage="grpo", reward_level=level)
    got = estimate_advantages(batch, settings, inputs(policy), None, None).advantages
    assert got.shape == mask.shape
    assert not got[~mask].any()
    returns = [t.episode_return for t in trajectories]
    for i, trajectory in enumerate(trajectories):
        other = returns[i ^ 1]
        sign = 1.0 if trajectory.episode_return > other else -1.0
        assert got[batch.trajectory == i][mask[batch.trajectory == i]].unique().tolist() == pytest.approx(
            [sign * 0.5**0.5], abs=1e-4
        )


@pytest.mark.parametrize("micro_batch", [0, 1])
def test_bootstrap_values_are_those_of_cut_ends(micro_batch: int) -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))
    got = bootstrap_values(batch, algorithm(), inputs(policy, micro_batch)).tolist()
    wanted = policy.value(batch.final_obs).tolist()
    assert got == pytest.approx([0.0, wanted[1], 0.0, wanted[3]])
    every = bootstrap_values(batch, algorithm(bootstrap="always"), inputs(policy, micro_batch))
    assert every.tolist() == pytest.approx(wanted)
    policy.rows_seen.clear()
    assert bootstrap_values(batch, algorithm(bootstrap="never"), inputs(policy, micro_batch)).tolist() == [0.0] * 4
    assert not policy.rows_seen, "a truncated episode counts as terminated"


def test_bootstrap_of_a_value_per_action_is_its_first() -> None:
    policy = ToyPolicy(per_action=True)
    batch = collate(collect(policy))
    got = bootstrap_values(batch, algorithm(bootstrap="always"), inputs(policy))
    assert got.tolist() == pytest.approx(policy.value(batch.final_obs)[:, 0].tolist())


def test_targets_by_hand_for_one_cut_trajectory() -> None:
    """Two chunk steps, λ = 1: the advantage is the discounted return with the final value, less V."""
    policy = ToyPolicy()
    batch = collate(collect(policy, (1, 2))[1:])
    settings = algorithm(gamma=0.9, gae_lambda=1.0, normalize_advantage=False)
    targets, _ = compute_targets(batch, settings, inputs(policy))
    reward, final = batch.rewards.sum(1), policy.value(batch.final_obs).float()[0]
    returns = torch.stack([reward[0] + 0.9 * (reward[1] + 0.9 * final), reward[1] + 0.9 * final])
    torch.testing.assert_close(targets.returns, returns)
    torch.testing.assert_close(targets.advantage[:, 0, 0], returns - batch.value)


def test_recomputed_proximal_equals_behaviour_of_a_fresh_sample() -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))
    for micro_batch in (0, 4):
        targets, _ = compute_targets(batch, algorithm(proximal="recompute"), inputs(policy, micro_batch))
        torch.testing.assert_close(targets.proximal.float(), targets.behavior, atol=1e-6, rtol=0)


def test_values_that_do_not_fit_the_level_are_refused() -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))
    with pytest.raises(ValueError, match="set it to chunk"):
        compute_targets(batch, algorithm(reward_level="action"), inputs(policy))


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"proximal": "recompute"}, 1),
        ({"proximal": "interpolate"}, 0),
        ({"proximal": "behavior"}, 0),
        ({"loss": "tis"}, 0),
        ({"loss": "tis", "advantage": {"type": "v_trace"}}, 1),
        ({"loss": "vanilla", "mismatch_cap": 5.0}, 1),
    ],
)
def test_only_what_needs_the_proximal_policy_computes_it(settings: dict[str, Any], passes: int) -> None:
    policy = ToyPolicy()
    batch = collate(collect(ToyPolicy()))
    targets, _ = compute_targets(batch, algorithm(**settings), inputs(policy))
    assert sum(policy.rows_seen) == passes * batch.chunk_steps + 2, "and the values at two cut ends"
    assert (targets.alpha is not None) == (settings.get("proximal") == "interpolate")


def test_interpolation_knows_how_old_each_chunk_step_is() -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))  # of versions 0 to 3
    targets, _ = compute_targets(batch, algorithm(proximal="interpolate"), inputs(policy, version=4))
    assert targets.alpha is not None
    ages = 4 - batch.version.double()
    torch.testing.assert_close(targets.alpha.double(), (ages - 1) / ages)


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_interpolation_knows_how_old_each_token_is(level: str) -> None:
    policy = ToyPolicy()
    samples = collect(policy)  # of versions 0 to 3
    newer = np.arange(CHUNK, dtype=np.int32)
    cut = [replace(x, newer=np.where(x.valid, newer, 0).astype(np.int32)) for x in samples]
    assert [x.newest for x in cut] == [x.ticket + CHUNK - 1 if x.steps > 1 or x.truncated else x.ticket for x in cut]
    settings = algorithm(proximal="interpolate", logprob_level=level)
    batch = collate(cut)
    targets, _ = compute_targets(batch, settings, inputs(policy, version=9))
    assert targets.alpha is not None
    by_token = 9 - batch.version.double()[:, None] - torch.from_numpy(np.concatenate([x.newer for x in cut]))
    ages = 9 - batch.version.double() if level == "chunk" else by_token
    torch.testing.assert_close(targets.alpha.double(), (ages - 1) / ages)
    there = torch.zeros_like(targets.behavior)
    proximal = interpolate(there, targets.behavior, targets.alpha)
    alpha = targets.alpha.unsqueeze(-1) if level == "token" else targets.alpha
    torch.testing.assert_close(proximal, (1 - alpha) * targets.behavior)


def test_a_penalty_in_the_reward_is_the_distance_to_the_reference() -> None:
    policy, reference = ToyPolicy(), ToyPolicy(seed=1)
    batch = collate(collect(policy))
    settings = {"normalize_advantage": False, "advantage": "reinforce_plus_plus"}
    plain = compute_targets(batch, algorithm(**settings), inputs(policy))[0].advantage[:, 0, 0]
    kl = {"coef": 0.3, "estimator": "k1", "place": "reward"}
    targets, _ = compute_targets(batch, algorithm(**settings, kl=kl), inputs(policy, reference=reference))
    there = reference.evaluate(batch.obs, batch.forward_inputs).logprob.detach()
    distance = ((batch.logprob - there) * batch.valid.unsqueeze(-1)).sum((1, 2))
    for i in range(len(batch.terminated)):
        mine = batch.trajectory == i
        wanted = plain[mine] - 0.3 * distance[mine].flip(0).cumsum(0).flip(0).float()
        torch.testing.assert_close(targets.advantage[mine, 0, 0].float(), wanted, atol=1e-5, rtol=1e-4)


def other_policy() -> ToyPolicy:
    """The trainer's weights, other than those that acted."""
    policy = ToyPolicy()
    with torch.no_grad():
        policy.logits.bias[::2].add_(0.5)
    return policy


@pytest.mark.parametrize("count_rejected", [True, False])
def test_rejected_entries_lose_their_loss_and_by_choice_their_count(count_rejected: bool) -> None:
    batch, policy = collate(collect(ToyPolicy())), other_policy()
    correction = {"weight": "token", "weight_max": 1.2, "reject": "ratio", "reject_above": 1.3}
    settings = algorithm(rollout_correction=correction | {"count_rejected": count_rejected})
    targets, metrics = compute_targets(batch, settings, inputs(policy))
    ratio = (targets.proximal - targets.behavior).exp()
    valid = batch.valid.unsqueeze(-1).expand_as(ratio)
    rejected = valid & (ratio > 1.3)
    assert 0 < rejected.sum() < valid.sum()
    assert targets.correction is not None
    torch.testing.assert_close(targets.correction, torch.where(valid & ~rejected, ratio.clamp(max=1.2), 0.0))
    counted = valid if count_rejected else valid & ~rejected
    assert torch.equal(targets.weight, counted.float())
    assert metrics["train/actor/rejected_fraction"] == pytest.approx(float(rejected.sum() / valid.sum()))
    clipped = valid & (ratio > 1.2)
    assert metrics["train/actor/correction_clip_fraction"] == pytest.approx(float(clipped.sum() / valid.sum()))
    kept = targets.correction[valid & ~rejected]
    assert metrics["train/actor/correction_weight"] == pytest.approx(float(kept.mean()))


def test_without_a_correction_there_is_none() -> None:
    targets, metrics = compute_targets(collate(collect(ToyPolicy())), algorithm(), inputs(other_policy()))
    assert targets.correction is None
    assert set(metrics) == {"train/critic/explained_variance"}


def test_advantages_are_clamped_after_whitening() -> None:
    batch, policy = collate(collect(ToyPolicy())), ToyPolicy()
    plain = compute_targets(batch, algorithm(), inputs(policy))[0].advantage
    clamped = compute_targets(batch, algorithm(advantage_clip=0.7), inputs(policy))[0].advantage
    assert plain.abs().max() > 0.7
    assert torch.equal(clamped, plain.clamp(-0.7, 0.7))


@pytest.mark.parametrize("aggregation", ["token_mean", "trajectory_mean", "episode_mean"])
def test_the_value_loss_by_hand(aggregation: str) -> None:
    """Trajectories of 3 and 1 chunk steps, of 5 and 1 executed actions: chunks of 2, the last cut short."""
    batch, policy = collate([collect(ToyPolicy(), (3,))[0], collect(ToyPolicy(), (1,))[0]]), ToyPolicy(seed=3)
    settings = algorithm(aggregation=aggregation, value={"aggregation": "policy", "clip": None, "huber": None})
    targets, _ = compute_targets(batch, settings, inputs(policy))
    objective = Objective(settings)
    found = policy.evaluate(batch.obs, batch.forward_inputs)
    loss = objective.loss(found, targets, normalizers_of(objective, targets), critic_only=False)
    each = (0.5 * (found.value.detach() - targets.returns) ** 2).tolist()
    wanted = {
        "token_mean": sum(each) / 4,
        "trajectory_mean": (sum(each[:3]) / 3 + each[3]) / 2,
        "episode_mean": (2 * sum(each[:3]) / 5 + 2 * each[3] / 1) / 2,
    }
    assert float(loss.metrics["train/critic/value_loss"]) == pytest.approx(wanted[aggregation], rel=1e-5)
    entropy = found.entropy.detach()[batch.valid].mean()
    assert float(loss.metrics["train/actor/entropy_loss"]) == pytest.approx(float(entropy)), "a mean over valid entries"


def test_the_correction_multiplies_the_policy_loss() -> None:
    batch, policy = collate(collect(ToyPolicy())), other_policy()
    correction = {"weight": "token", "reject": "ratio", "reject_above": 1.3}
    settings = algorithm(rollout_correction=correction, loss="vanilla")
    targets, _ = compute_targets(batch, settings, inputs(policy))
    objective = Objective(settings)
    found = policy.evaluate(batch.obs, batch.forward_inputs)
    loss = objective.loss(found, targets, normalizers_of(objective, targets), critic_only=False)
    ratio = (targets.proximal - targets.behavior).exp()
    valid = batch.valid.unsqueeze(-1).expand_as(ratio)
    each = torch.where(ratio <= 1.3, ratio, 0.0) * -targets.advantage * found.logprob.detach()
    assert float(loss.metrics["train/actor/policy_loss"]) == pytest.approx(float(each[valid].mean()), rel=1e-5)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_cap_bounds_the_divergence_from_the_reference(place: str) -> None:
    batch, policy, reference = collate(collect(ToyPolicy())), ToyPolicy(), ToyPolicy(seed=1)
    spreads = []
    for cap in (None, 0.01):
        kl = {"coef": 0.3, "cap": cap, "place": place}
        settings = algorithm(kl=kl, normalize_advantage=False, advantage="reinforce_plus_plus")
        targets, _ = compute_targets(batch, settings, inputs(policy, reference=reference))
        objective = Objective(settings)
        found = policy.evaluate(batch.obs, batch.forward_inputs)
        loss = objective.loss(found, targets, normalizers_of(objective, targets), critic_only=False)
        spreads.append((float(loss.metrics["train/actor/reference_kl"]), targets.advantage.sum().item()))
    assert spreads[1][0] <= 0.01 < spreads[0][0]
    assert (spreads[1][1] > spreads[0][1]) == (place == "reward"), "a smaller penalty, where there is one in the reward"
