"""Normalisation layers, computed in float32 whatever the dtype of the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019) times a learned scale.

    offset: added to the stored weight; 1 in Gemma, whose weights are deviations from 1, otherwise 0.
    """

    def __init__(self, width: int, eps: float = 1e-6, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        """[...,width] -> the same shape and dtype."""
        return (normalise(x, self.eps) * (self.offset + self.weight.float())).to(x.dtype)


class AdaRMSNorm(nn.Module):
    """Root-mean-square normalisation whose scale and shift follow from a condition (pi0.5's action expert).

    Its third output is the gate by which the branch behind the norm is multiplied.
    """

    def __init__(self, width: int, condition: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dense = nn.Linear(condition, 3 * width)
        self.eps = eps

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,width], condition [B,condition] -> normalised x [B,T,width], gate [B,1,width], in x's dtype."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).float().chunk(3, dim=-1)
        return (normalise(x, self.eps) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x [...,width] divided by its root mean square over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
