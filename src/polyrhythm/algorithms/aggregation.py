"""How per-entry losses become one number: the weight of each entry, and the normaliser.

A loss is Σ weight·entry / normaliser. Weights are computed once per update over all its entries. The normaliser is one
number for an optimizer step's whole mini-batch (over all its micro-batches and ranks), so neither the micro-batch size
nor the number of ranks changes the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "trajectory_mean", "episode_mean", "sum_over_constant"]


def entry_weights(
    mask: Tensor,
    trajectory: Tensor,
    aggregation: Aggregation,
    *,
    valid: Tensor,
    counts: tuple[int, int] | None = None,
) -> Tensor:
    """Float32 weights shaped like mask ([N,...] bool, at the level of the loss); 0 where masked.

    trajectory [N] int64; valid [N,C] bool: the primitive actions that were executed.
    token_mean, sum_over_constant: 1 per entry.
    trajectory_mean: 1/(valid entries of the entry's trajectory), so that the weights of each trajectory sum to 1.
    episode_mean: (N/M)·(C/e)/(executed actions of the entry's trajectory), M trajectories, e entries per chunk step;
    RLinf's `masked_mean_ratio` (T_max cancels where a rollout is as long as T_max). counts: N and M of the whole update
    where this is a part of it.
    """
    weight = mask.to(torch.float32)
    if aggregation == "trajectory_mean":
        return weight * per_row_like(_total(weight, trajectory).reciprocal()[trajectory], weight)
    if aggregation == "episode_mean":
        executed = _total(valid.to(torch.float32), trajectory)
        entries = max(weight[:1].numel(), 1)
        steps, trajectories = counts or (len(trajectory), len(executed))
        scale = steps / trajectories * valid.shape[1] / entries
        return weight * per_row_like(scale * executed.reciprocal()[trajectory], weight)
    return weight


def normalizer(
    weights: float, chunk_steps: int, aggregation: Aggregation = "token_mean", constant: float | None = None
) -> float:
    """What a mini-batch's weighted sum is divided by. weights: their sum over the whole mini-batch, on all ranks.

    sum_over_constant: the constant. episode_mean: the chunk steps. Otherwise the sum of the weights, or 1 where nothing
    is valid (the loss is then 0, not NaN).
    """
    if aggregation == "sum_over_constant":
        assert constant is not None
        return constant
    if aggregation == "episode_mean":
        return float(max(chunk_steps, 1))
    return weights or 1.0


def _total(x: Tensor, trajectory: Tensor) -> Tensor:
    """x [N,...] summed by trajectory, at least 1: [M]."""
    per_row = x.flatten(1).sum(1) if x.dim() > 1 else x
    return per_row.new_zeros(int(trajectory.max()) + 1).index_add_(0, trajectory, per_row).clamp_min(1.0)


def per_row_like(x: Tensor, like: Tensor) -> Tensor:
    """x [N] or [N,C] shaped to broadcast against `like` [N,...] or [N,C,...]."""
    return x.reshape(*x.shape, *(1,) * (like.dim() - x.dim()))
