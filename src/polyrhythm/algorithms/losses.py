"""Losses per entry, before weighting. Notation of the formulas: ρ = exp(logπ_θ − logπ_prox), A the advantage.

Every policy loss has the same form: `loss(entries, *, settings by keyword) -> Terms`, and stands in
`POLICY_LOSSES` under the name that `algorithm.loss.type` gives; its keywords are that section's fields. A new loss
is one function and one line in the table. A loss returns values per entry; the caller weighs and sums them
(`aggregation`). Masked entries hold zeros (`levels` makes them so).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

#: Log-ratios are cut here before exp, so that one wild entry gives a huge number and not inf·0 = NaN.
LOG_RATIO_LIMIT = 20.0


class Entries(NamedTuple):
    """What a policy loss sees; all of one shape ([N], [N,C] or [N,C,A], see `levels`), zero where mask is False.

    logprob: logπ_θ, the only one with gradient. proximal: logπ_prox, the policy that clipping stays near (equal to
    behavior for plain PPO). behavior: logπ_b, the policy that acted. mask: bool.
    """

    logprob: Tensor
    proximal: Tensor
    behavior: Tensor
    advantage: Tensor
    mask: Tensor


class Terms(NamedTuple):
    """Loss per entry, and figures per entry for the log (without gradient, same shape, named as they are logged)."""

    loss: Tensor
    figures: dict[str, Tensor]


PolicyLoss = Callable[..., Terms]


def ppo(entries: Entries, *, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Terms:
    """−min(ρA, clip(ρ, 1−ε_lo, 1+ε_hi)·A), for A < 0 at most dual_clip·|A| (Schulman 2017; Ye 2020 for dual clip).

    clip_high > clip_low is DAPO's clip-higher. dual_clip: c > 1, or None for off.
    Example: ρ = 2, A = 1, ε = 0.2 → −1.2. ρ = 5, A = −1, c = 3 → 3.
    """
    ratio = torch.exp(_log_ratio(entries.logprob, entries.proximal))
    plain = -entries.advantage * ratio
    bounded = -entries.advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    figures = {"clip_fraction": (bounded > plain).float()}
    if dual_clip is not None:
        ceiling = -entries.advantage * dual_clip
        hit = (entries.advantage < 0) & (loss > ceiling)
        loss = torch.where(hit, ceiling, loss)
        figures["dual_clip_fraction"] = hit.float()
    return Terms(loss, figures)


def decoupled_ppo(
    entries: Entries,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    behave_weight_threshold: float | None = None,
) -> Terms:
    """w·(PPO loss around π_prox) with w = π_prox/π_b (Hilton 2021; RLinf's decoupled_actor_critic).

    Entries with w > behave_weight_threshold (None: off) contribute nothing, but still count in the normaliser.
    Where π_prox = π_b this is `ppo`, to the bit.
    """
    inner = ppo(entries, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = torch.exp(_log_ratio(entries.proximal, entries.behavior)).detach()
    dropped = torch.zeros_like(entries.mask)
    if behave_weight_threshold is not None:
        dropped = weight > behave_weight_threshold
        weight = torch.where(dropped, 0.0, weight)
    return Terms(weight * inner.loss, inner.figures | {"behav_clip_fraction": dropped.float()})


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType({"ppo": ppo, "decoupled_ppo": decoupled_ppo})


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor, *, clip: float | None, huber: float | None
) -> Tensor:
    """max(h(V − R), h(V_old + clamp(V − V_old, ±clip) − R)) per entry, zero where masked; all [N] or [N,C].

    h(e) = ½e², beyond |e| = δ the line δ(|e| − ½δ) (huber = δ). clip None: unclipped; huber None: no line.
    Example: V = 2, V_old = 0, R = 1, clip 0.2 → max(½, ½·0.8²) = 0.5.
    """
    value = torch.where(mask, value, 0.0)
    old_value, returns = torch.where(mask, old_value, 0.0), torch.where(mask, returns, 0.0)
    loss = _huber(value - returns, huber)
    if clip is None:
        return loss
    near = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(loss, _huber(near - returns, huber))


def _huber(error: Tensor, delta: float | None) -> Tensor:
    if delta is None:
        return 0.5 * error.square()
    size = error.abs()
    return torch.where(size <= delta, 0.5 * error.square(), delta * (size - 0.5 * delta))


def _log_ratio(new: Tensor, old: Tensor) -> Tensor:
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
