"""Levels of log-probability ratios, entropies and rewards: token, action or chunk.

Policies use [N,C,A] (N chunk steps, C primitive actions per chunk, A entries per action); losses use entries. Only
these functions convert one into the other. Masked entries come out as exact zeros, whatever stood there (NaN included),
and receive no gradient; the losses rely on it.

Example, N = 1, C = 2, A = 3, every log-probability −1, only the first action executed:
token → [[[-1,-1,-1],[0,0,0]]], action → [[-3, 0]], chunk → [-3].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

LogprobLevel = Literal["token", "action", "chunk"]
RewardLevel = Literal["action", "chunk"]


def reduce(x: Tensor, valid: Tensor, level: LogprobLevel) -> Tensor:
    """x [N,C,A] summed to its level: [N,C,A], [N,C] or [N]. valid [N,C] bool. Zero where masked."""
    filled = torch.where(valid.unsqueeze(-1), x, 0.0)
    if level == "token":
        return filled
    return filled.sum(-1) if level == "action" else filled.sum((-2, -1))


def mask(valid: Tensor, level: LogprobLevel, action_dim: int) -> Tensor:
    """Mask of the entries that `reduce` yields: bool [N,C,A], [N,C] or [N]. A chunk counts if any action does."""
    if level == "token":
        return valid.unsqueeze(-1).expand(-1, -1, action_dim)
    return valid if level == "action" else valid.any(-1)


def reduce_rewards(rewards: Tensor, valid: Tensor, level: RewardLevel) -> Tensor:
    """rewards [N,C] at their level: [N,C], or [N] as the undiscounted sum of the chunk (γ is then per chunk)."""
    filled = torch.where(valid, rewards, 0.0)
    return filled if level == "action" else filled.sum(-1)


def reward_mask(valid: Tensor, level: RewardLevel) -> Tensor:
    """Mask of the entries that `reduce_rewards` yields: bool [N,C] or [N]."""
    return valid if level == "action" else valid.any(-1)


def spread(x: Tensor, entries: Tensor) -> Tensor:
    """x at reward level ([N] or [N,C]) repeated over the finer `entries` ([N], [N,C] or [N,C,A]), zero where masked.

    entries: bool mask, as from `mask`. ValueError: it is coarser than x (rewards per action, ratios per chunk).
    """
    if x.dim() > entries.dim():
        raise ValueError(
            f"rewards per action {tuple(x.shape)} cannot be spread over log-probs per chunk {tuple(entries.shape)}: "
            "set algorithm.logprob_level to token or action, or algorithm.reward_level to chunk"
        )
    trailing = (1,) * (entries.dim() - x.dim())
    return torch.where(entries, x.reshape(*x.shape, *trailing), 0.0)
