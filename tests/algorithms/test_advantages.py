from __future__ import annotations

import pytest
import torch
from tests.algorithms.reference import gae_of_one
from torch import Tensor

from polyrhythm.algorithms.advantages import bootstrapped, gae, grpo, normalize


def packed(lengths: list[int], chunk: int | None, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """rewards, values, valid, trajectory, bootstrap in float64; the last chunk of each trajectory is cut short."""
    rng = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    shape = (n,) if chunk is None else (n, chunk)
    rewards, values = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    valid = torch.ones(shape, dtype=torch.bool)
    if chunk is not None:
        for last in torch.tensor(lengths).cumsum(0) - 1:
            valid[last, int(torch.randint(1, chunk + 1, (), generator=rng)) :] = False
    trajectory = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return rewards, values, valid, trajectory, torch.randn(len(lengths), generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("lengths", [[1], [5], [3, 1, 7, 2]])
@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0)])
def test_gae_is_the_explicit_sum(chunk: int | None, lengths: list[int], gamma: float, lam: float) -> None:
    rewards, values, valid, trajectory, bootstrap = packed(lengths, chunk, seed=1)
    got = gae(rewards, values, valid, trajectory, bootstrap, gamma=gamma, gae_lambda=lam)
    for i, last in enumerate(bootstrap.tolist()):
        mine = (trajectory == i).reshape(-1, *(1,) * (valid.dim() - 1)) & valid
        loops = gae_of_one(rewards[mine].tolist(), values[mine].tolist(), last, gamma, lam)
        wanted = torch.tensor(loops, dtype=torch.float64)
        torch.testing.assert_close(got.advantages[mine], wanted)
        torch.testing.assert_close(got.returns[mine], wanted + values[mine])
    assert not got.advantages[~valid].any()
    assert not got.returns[~valid].any()


def test_gae_worked_example() -> None:
    got = gae(
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([True, True]),
        torch.tensor([0, 0]),
        torch.tensor([0.0]),
        gamma=1.0,
        gae_lambda=1.0,
    )
    assert got.advantages.tolist() == [0.5, 0.5]
    assert got.returns.tolist() == [1.0, 1.0]


def test_masked_entries_never_matter_even_inside_a_trajectory() -> None:
    rewards, values, valid, trajectory, bootstrap = packed([4, 3], 3, seed=2)
    valid[1, 1] = False
    wanted = gae(rewards, values, valid, trajectory, bootstrap, gamma=0.9, gae_lambda=0.8)
    rewards[~valid], values[~valid] = torch.nan, torch.inf
    got = gae(rewards, values, valid, trajectory, bootstrap, gamma=0.9, gae_lambda=0.8)
    assert torch.equal(got.advantages, wanted.advantages)
    assert torch.equal(normalize(got.advantages, valid), normalize(wanted.advantages, valid))


def test_truncation_with_bootstrap_is_reward_plus_discounted_final_value() -> None:
    """The textbook form: r_last += γ·V(final), then GAE as if the task had ended."""
    rewards, values, valid, trajectory, bootstrap = packed([3, 4], None, seed=3)
    got = gae(rewards, values, valid, trajectory, bootstrap, gamma=0.97, gae_lambda=0.9)
    raised = rewards.clone()
    raised[[2, 6]] += 0.97 * bootstrap
    wanted = gae(raised, values, valid, trajectory, torch.zeros_like(bootstrap), gamma=0.97, gae_lambda=0.9)
    torch.testing.assert_close(got.advantages, wanted.advantages)


def test_trajectories_do_not_leak_into_each_other() -> None:
    rewards, values, valid, trajectory, bootstrap = packed([3, 4], None, seed=4)
    both = gae(rewards, values, valid, trajectory, bootstrap, gamma=0.9, gae_lambda=0.9).advantages
    alone = gae(
        rewards[3:], values[3:], valid[3:], trajectory[3:] - 1, bootstrap[1:], gamma=0.9, gae_lambda=0.9
    ).advantages
    assert torch.equal(both[3:], alone)


def test_bootstrap_kinds() -> None:
    terminated, truncated = torch.tensor([True, False, True, False]), torch.tensor([False, True, True, False])
    assert bootstrapped(terminated, truncated, "standard").tolist() == [False, True, False, False]
    assert bootstrapped(terminated, truncated, "always").all()


def test_normalize_whitens_valid_entries_only() -> None:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(6, 4, generator=rng, dtype=torch.float64) * 3 + 7
    valid = torch.rand(6, 4, generator=rng) > 0.3
    got = normalize(x, valid)
    entries = x[valid].tolist()
    mean = sum(entries) / len(entries)
    std = (sum((e - mean) ** 2 for e in entries) / len(entries)) ** 0.5
    wanted = torch.tensor([(e - mean) / (std + 1e-8) for e in entries], dtype=torch.float64)
    torch.testing.assert_close(got[valid], wanted)
    assert not got[~valid].any()


@pytest.mark.parametrize("count", [0, 1])
def test_normalize_of_too_few_entries_is_zero(count: int) -> None:
    valid = torch.tensor([True, False]) if count else torch.tensor([False, False])
    assert normalize(torch.tensor([3.0, 4.0]), valid).tolist() == [0.0, 0.0]


def test_grpo_worked_example() -> None:
    got = grpo(torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7])).tolist()
    assert got == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-6)


def test_grpo_compares_within_groups_in_any_order() -> None:
    scores = torch.tensor([3.0, 1.0, 5.0, 2.0, 1.0, 0.5, 4.0], dtype=torch.float64)
    group = torch.tensor([9, 4, 9, 4, 4, 2, 9])
    got = grpo(scores, group)
    for number in (9, 4, 2):
        mine = scores[group == number].tolist()
        mean = sum(mine) / len(mine)
        std = (sum((x - mean) ** 2 for x in mine) / max(len(mine) - 1, 1)) ** 0.5
        wanted = [(x - mean) / (std + 1e-6) for x in mine]
        assert got[group == number].tolist() == pytest.approx(wanted)
    assert got[5] == 0, "a group of one has nobody to be compared with"
    assert not grpo(torch.ones(4), torch.zeros(4, dtype=torch.int64)).any()
