"""Shared parts of the layers: norms, attention, and recomputation in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


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
    """RMS normalisation whose scale and shift depend on a condition (pi0.5's action expert).

    It also returns a gate that multiplies the branch after the norm.
    """

    def __init__(self, width: int, condition: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dense = nn.Linear(condition, 3 * width)
        self.eps = eps

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,T,width], condition [B,condition] -> normalised x [B,T,width] and gate [B,1,width], in x's dtype."""
        scale, shift, gate = self.dense(condition).unsqueeze(1).float().chunk(3, dim=-1)
        return (normalise(x, self.eps) * (1.0 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x [...,width] divided by its root mean square over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def run_layer(layer: nn.Module, *arguments: object, recompute: bool) -> Any:
    """`layer(*arguments)`. recompute: keep only the arguments for the backward pass."""
    if recompute and torch.is_grad_enabled():
        return checkpoint(layer, *arguments, use_reentrant=False)
    return layer(*arguments)


#: Keys and values of one layer: [B,KV,T,D] each, keys already rotated.
KeysValues = tuple[Tensor, Tensor]
#: cos and sin of the rotary angles: [B,1,T,D] float32 each.
Rotary = tuple[Tensor, Tensor]


def rotary(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Rotary angles (Su et al. 2021; halves, not pairs) of positions [B,T]: cos and sin [B,1,T,head_dim] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotary) -> Tensor:
    """Rotate x [B,H,T,D] by the angles of its positions."""
    cos, sin = by[0].to(x.dtype), by[1].to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def positions_of(present: Tensor) -> Tensor:
    """Position of each present token among the present ones: bool [B,T] -> int64 [B,T] (-1 before the first one)."""
    return present.long().cumsum(dim=1) - 1


def mean_of(x: Tensor, present: Tensor) -> Tensor:
    """Mean over present tokens: [B,T,W], bool [B,T] -> [B,W]."""
    weights = present.unsqueeze(2).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1)


def padding_mask(present: Tensor) -> Tensor:
    """Mask of full attention among present tokens: bool [B,T] -> [B,1,T,T]."""
    return (present.unsqueeze(1) & present.unsqueeze(2)).unsqueeze(1)


def causal_mask(present: Tensor) -> Tensor:
    """Mask of causal attention among present tokens: bool [B,T] -> [B,1,T,T]."""
    length = present.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=present.device).tril()
    return padding_mask(present) & earlier


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as summands of scores: 0 where it is true, the most negative finite number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention: [B,H,Q,D], [B,KV,K,D] twice -> [B,Q,H·D]. H is a multiple of KV (shared keys)."""
    if keys.shape[1] != queries.shape[1]:
        shape = (-1, queries.shape[1] // keys.shape[1], -1, -1)
        if keys.shape[1] == 1:
            keys, values = keys.expand(*shape), values.expand(*shape)
        else:
            keys, values = (x.repeat_interleave(shape[1], dim=1) for x in (keys, values))
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    merged: Tensor = found.transpose(1, 2).flatten(2)
    return merged


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B,T,H·D] -> [B,H,T,D]."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)
