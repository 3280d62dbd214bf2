from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.training.toy import ToyPolicy, algorithm, collect

from polyrhythm.algorithms.levels import RewardLevel, reward_mask
from polyrhythm.training.batch import collate, minibatches
from polyrhythm.training.targets import bootstrap_values, group_advantages, prepare

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
    cut = minibatches(65, 64, (1, 2, 3))
    assert [len(x) for x in cut] == [33, 32]
    assert sorted(torch.cat(cut).tolist()) == list(range(65))
    assert [len(x) for x in minibatches(7, 0, (0, 0, 0))] == [7]


def test_minibatches_follow_their_seed_alone() -> None:
    first = minibatches(50, 10, (1, 2, 3))
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, minibatches(50, 10, (1, 2, 3)), strict=True))
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(torch.cat(first), torch.cat(minibatches(50, 10, other)))


@pytest.mark.parametrize("level", ["chunk", "action"])
def test_group_advantages_are_of_whole_returns_at_every_valid_entry(level: RewardLevel) -> None:
    trajectories = [replace(t, group=7 + i // 2) for i, t in enumerate(collect(ToyPolicy()))]
    batch = collate(trajectories)
    mask = reward_mask(batch.valid, level)
    got = group_advantages(batch, mask)
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
    got = bootstrap_values(batch, policy, algorithm(), micro_batch=micro_batch, device=CPU).tolist()
    wanted = policy.value(batch.final_obs).tolist()
    assert got == pytest.approx([0.0, wanted[1], 0.0, wanted[3]])
    every = bootstrap_values(batch, policy, algorithm(bootstrap="always"), micro_batch=micro_batch, device=CPU)
    assert every.tolist() == pytest.approx(wanted)


def test_bootstrap_of_a_value_per_action_is_its_first() -> None:
    policy = ToyPolicy(per_action=True)
    batch = collate(collect(policy))
    got = bootstrap_values(batch, policy, algorithm(bootstrap="always"), micro_batch=0, device=CPU)
    assert got.tolist() == pytest.approx(policy.value(batch.final_obs)[:, 0].tolist())


def test_prepare_by_hand_for_one_cut_trajectory() -> None:
    """Two chunk steps, λ = 1: the advantage is the discounted return with the final value, less V."""
    policy = ToyPolicy()
    batch = collate(collect(policy, (1, 2))[1:])
    settings = algorithm(gamma=0.9, gae_lambda=1.0, normalize_advantage=False)
    decisions, _ = prepare(batch, policy, settings, micro_batch=0, device=CPU)
    reward, final = batch.rewards.sum(1), policy.value(batch.final_obs).float()[0]
    returns = torch.stack([reward[0] + 0.9 * (reward[1] + 0.9 * final), reward[1] + 0.9 * final])
    torch.testing.assert_close(decisions.returns, returns)
    torch.testing.assert_close(decisions.advantage[:, 0, 0], returns - batch.value)


def test_recomputed_proximal_equals_behaviour_of_a_fresh_sample() -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))
    for micro_batch in (0, 4):
        decisions, _ = prepare(batch, policy, algorithm(proximal="recompute"), micro_batch=micro_batch, device=CPU)
        torch.testing.assert_close(decisions.proximal.float(), decisions.behavior, atol=1e-6, rtol=0)


def test_values_that_do_not_fit_the_level_are_refused() -> None:
    policy = ToyPolicy()
    batch = collate(collect(policy))
    with pytest.raises(ValueError, match="set it to chunk"):
        prepare(batch, policy, algorithm(reward_level="action"), micro_batch=0, device=CPU)
