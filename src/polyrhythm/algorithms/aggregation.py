"""How much does each entry count in a loss: every entry alike, or every trajectory alike?

A loss is Σ weight·entry / normaliser. Weights are fixed once per update over all its entries; the normaliser is
the sum of the weights of one optimizer step's whole mini-batch (over all its micro-batches and ranks), or a constant,
so neither the micro-batch size nor the number of ranks changes the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "trajectory_mean", "sum_over_constant"]


def entry_weights(mask: Tensor, trajectory: Tensor, aggregation: Aggregation) -> Tensor:
    """Float32 weights shaped like mask ([N,...] bool, at the level of the loss); 0 where masked.

    trajectory [N] int64. token_mean, sum_over_constant: 1 per entry. trajectory_mean: 1/(valid entries of the entry's
    trajectory), so that the weights of each trajectory sum to 1.
    """
    weight = mask.to(torch.float32)
    if aggregation != "trajectory_mean":
        return weight
    per_decision = weight.flatten(1).sum(1) if weight.dim() > 1 else weight
    total = per_decision.new_zeros(int(trajectory.max()) + 1).index_add_(0, trajectory, per_decision)
    share = total.clamp_min(1.0).reciprocal()[trajectory]
    return weight * share.reshape(-1, *(1,) * (weight.dim() - 1))


def normalizer(weight: Tensor) -> Tensor:
    """Scalar to divide by: the sum of the weights, or 1 where nothing is valid (the loss is then 0, not NaN)."""
    total = weight.sum()
    return torch.where(total > 0, total, 1.0)
