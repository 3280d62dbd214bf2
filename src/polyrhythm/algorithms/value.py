"""The value loss per entry, before aggregation."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None, huber: float | None
) -> Tensor:
    """max(h(V − R), h(V_old + clamp(V − V_old, ±clip) − R)) per entry, zero where masked; all [N] or [N,C].

    h(e) = ½e², and for |e| > δ the linear δ(|e| − ½δ) (huber = δ). clip None: no clipping; huber None: squared error.
    Example: V = 2, V_old = 0, R = 1, clip 0.2 → max(½, ½·0.8²) = 0.5.
    """
    value = torch.where(mask, value, 0.0)
    old_value, returns = torch.where(mask, old_value, 0.0), torch.where(mask, returns, 0.0)
    loss = _huber(value - returns, huber)
    if clip is None:
        return loss
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, _huber(clipped - returns, huber))


def _huber(error: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))
