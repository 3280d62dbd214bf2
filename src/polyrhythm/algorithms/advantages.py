"""How much better was an action than expected, over packed trajectories: by a value function, or by a group's others.

Packed means that the decisions of all trajectories stand one after another, without padding: trajectory 0
complete and in time order, then trajectory 1, and so on. Sources: Schulman et al. 2016 (GAE); truncation as in
Pardo et al. 2018; Shao et al. 2024 (GRPO). Deviation: none, but masked entries are skipped instead of zeroed, so that
a chunk cut short by the end of its episode never puts a gap into the recursion.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Bootstrap = Literal["standard", "always"]


class Advantages(NamedTuple):
    """advantages and returns (targets of the value function), shaped like the rewards; zero where masked."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    valid: Tensor,
    trajectory: Tensor,
    bootstrap: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> Advantages:
    """A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t, and returns A_t + V_t.

    rewards, values, valid (bool): [N] or [N,C]. trajectory [N] int64, non-decreasing, in 0..M-1. bootstrap [M] is
    the value after each trajectory's last valid entry: V(final observation), or 0 where the task ended there.
    Example: rewards (0, 1), values (0.5, 0.5), bootstrap 0, γ = 1, λ = 1 → advantages (0.5, 0.5), returns (1, 1).
    """
    trailing = (1,) * (rewards.dim() - 1)
    owner = trajectory.reshape(-1, *trailing).expand_as(rewards)[valid]
    reward, value = rewards[valid], values[valid]
    count = torch.bincount(owner, minlength=bootstrap.shape[0])
    first = count.cumsum(0) - count
    step = torch.arange(owner.shape[0], device=owner.device) - first[owner]

    after = torch.roll(value, -1)
    nonempty = count > 0
    after[(first + count - 1)[nonempty]] = bootstrap[nonempty].to(after.dtype)
    delta = reward + gamma * after - value

    table = delta.new_zeros(int(count.max()), bootstrap.shape[0])  # one column per trajectory, zeros behind its end
    table[step, owner] = delta
    for t in range(table.shape[0] - 2, -1, -1):
        table[t].add_(table[t + 1], alpha=gamma * gae_lambda)

    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[valid] = table[step, owner]
    returns[valid] = advantages[valid] + value
    return Advantages(advantages, returns)


def bootstrapped(terminated: Tensor, truncated: Tensor, bootstrap: Bootstrap) -> Tensor:
    """Which trajectories [M] (bool) continue in value behind their end.

    `standard`: those cut (by the time limit or a segment's end) while the task went on; `always`: every one.
    """
    if bootstrap == "always":
        return torch.ones_like(terminated)
    return truncated & ~terminated


def grpo(scores: Tensor, group: Tensor, *, eps: float = 1e-6) -> Tensor:
    """A_i = (R_i − mean_g)/(std_g + eps): each trajectory's score against its group's, [M]. No value function.

    scores [M]: one per trajectory, such as its return. group [M] int64: equal where task and initial state are; any
    numbers, in any order. std divides by the group's size − 1; a group of one, or of equal scores, gives 0.
    Example: scores (1, 0, 0, 1), one group → mean 0.5, std 0.577 → (0.866, -0.866, -0.866, 0.866).
    """
    _, place = torch.unique(group, return_inverse=True)
    count = torch.bincount(place).to(scores.dtype)
    centred = scores - (torch.zeros_like(count).index_add_(0, place, scores) / count)[place]
    square = torch.zeros_like(count).index_add_(0, place, centred.square())
    std = (square / (count - 1).clamp(min=1)).sqrt()
    return centred / (std[place] + eps)


def normalize(advantages: Tensor, valid: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(A − mean)/(std + eps) over the valid entries, zero elsewhere.

    std divides by the number of entries (ddof 0), so that a single entry is defined, too: it becomes 0.
    """
    entries = advantages[valid]
    if entries.numel() == 0:
        return torch.zeros_like(advantages)
    centred = entries - entries.mean()
    out = torch.zeros_like(advantages)
    out[valid] = centred / (centred.square().mean().sqrt() + eps)
    return out
