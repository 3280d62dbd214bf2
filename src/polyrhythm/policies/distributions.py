"""Log-prob, entropy, mode and sample of the two action distributions, in float32 for any backbone dtype.

Pure functions of tensors; noise is an argument (`polyrhythm.policies.noise`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


#: Logit of a choice that does not exist: its probability, and so its share of the entropy, is exactly 0.
_NEVER = -1e9


def log_probs(logits: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Normalised log-probabilities over the last axis: [..., K] -> [..., K] float32. allowed: bool mask of existing
    choices, broadcast; None for all."""
    if allowed is not None:
        logits = logits.float().masked_fill(~allowed, _NEVER)
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def categorical_logprob(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Log-prob of each token: log_p [..., K] float32, tokens [...] int64 -> [...] float32."""
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(log_p: Tensor) -> Tensor:
    """Entropy in nats: log_p [..., K] -> [...]."""
    return -(log_p.exp() * log_p).sum(-1)


def categorical_mean(log_p: Tensor) -> Tensor:
    """Token nearest to the expectation, for tokens that are equal bins of a continuous range: [..., K] -> [...]."""
    return (log_p.exp() @ torch.arange(log_p.shape[-1], dtype=log_p.dtype, device=log_p.device)).round().long()


def categorical_sample(
    log_p: Tensor, uniform: Tensor, greedy: Tensor, best: Tensor, last: Tensor | None = None
) -> Tensor:
    """Token by inverse CDF, or `best` where `greedy`. log_p [B,...,K] float32, uniform [B,...] in (0,1), greedy [B]
    bool, best [B,...] int64 -> [B,...] int64. last: last existing choice, broadcast; None for K - 1. It needs one
    uniform number per token; the Gumbel trick needs K."""
    cdf = log_p.exp().cumsum(-1)
    drawn = (cdf <= uniform.unsqueeze(-1) * cdf[..., -1:]).sum(-1)
    drawn = drawn.clamp_(max=log_p.shape[-1] - 1) if last is None else torch.minimum(drawn, last)
    return torch.where(_rowwise(greedy, drawn), best, drawn)


def normal_logprob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Log-density of each entry of a diagonal normal: broadcast tensors -> their common shape, at least float32."""
    z = (_wide(x) - _wide(mean)) * torch.exp(-_wide(log_std))
    return -0.5 * z * z - (_wide(log_std) + _HALF_LOG_2PI)


def normal_entropy(log_std: Tensor) -> Tensor:
    """Differential entropy of each entry in nats."""
    return _wide(log_std) + (0.5 + _HALF_LOG_2PI)


def normal_sample(mean: Tensor, log_std: Tensor, noise: Tensor, greedy: Tensor) -> Tensor:
    """mean + std·noise, or the mean where `greedy`: mean and noise [B,...], log_std broadcast, greedy [B] bool."""
    mean = mean.float()
    return torch.where(_rowwise(greedy, mean), mean, mean + torch.exp(log_std.float()) * noise)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rowwise(flags: Tensor, like: Tensor) -> Tensor:
    return flags.view(-1, *(1,) * (like.dim() - 1))
