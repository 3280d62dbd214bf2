"""Policy losses per entry, before weighting. Formulas: r = π_θ/π_prox, ρ = π_θ/π_b, A the advantage, sg stop-gradient.

Every one has the same form: `loss(entries, *, settings by keyword) -> Terms`, and stands in `POLICY_LOSSES` under the
name that `algorithm.loss.type` gives; its keywords are that section's fields. A new loss is one function and one line
in the table, or a user's `module:function`. A loss returns values per entry; the caller weighs and sums them
(`aggregation`). Masked entries hold zeros (`levels` makes them so).

Two families for stale data (ROLL Flash, section 2.2): what clips takes the gradient of entries outside a trust region
away; what weighs keeps every gradient and bounds its weight. Those of the first are around π_prox, but for `gspo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import log_ratio


class Entries(NamedTuple):
    """What a policy loss sees; all of one shape ([N], [N,C] or [N,C,A], see `levels`), zero where mask is False.

    logprob: logπ_θ, the only one with gradient. proximal: logπ_prox, the policy that clipping stays near (equal to
    behavior where `algorithm.proximal` is behavior). behavior: logπ_b, the policy that acted. mask: bool.
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
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A), for A < 0 at most dual_clip·|A| (Schulman 2017; Ye 2020 for dual clip).

    clip_high > clip_low is DAPO's clip-higher. dual_clip: c > 1, or None for off.
    Example: r = 2, A = 1, ε = 0.2 → −1.2. r = 5, A = −1, c = 3 → 3.
    """
    loss, figures = _clipped(log_ratio(entries.logprob, entries.proximal).exp(), entries, clip_low, clip_high)
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
    weight = torch.exp(log_ratio(entries.proximal, entries.behavior)).detach()
    if behave_weight_threshold is None:
        return Terms(weight * inner.loss, inner.figures)
    dropped = weight > behave_weight_threshold
    loss = torch.where(dropped, 0.0, weight) * inner.loss
    return Terms(loss, inner.figures | {"behav_clip_fraction": dropped.float()})


def gspo(entries: Entries, *, clip_low: float, clip_high: float) -> Terms:
    """`ppo` with one ρ for a whole sequence: exp of the mean of log(π_θ/π_b) over its entries (Zheng 2025).

    A sequence is one decision, what the policy says at a time: all tokens of a language model's answer (C tokens,
    A = 1), all entries of a robot's action chunk. At level chunk there is one entry, and this is `ppo` around π_b.
    Example: log-ratios (0.4, 0.0) → ρ = exp(0.2) for both.
    """
    x = log_ratio(entries.logprob, entries.behavior)
    if x.dim() > 1:
        axes = tuple(range(1, x.dim()))
        count = entries.mask.sum(axes, keepdim=True).clamp(min=1)
        x = (torch.where(entries.mask, x, 0.0).sum(axes, keepdim=True) / count).expand_as(x)
    return _clipped(x.exp(), entries, clip_low, clip_high)


def vanilla(entries: Entries) -> Terms:
    """−A·logπ_θ (Williams 1992, REINFORCE): no correction for staleness, right only where π_b = π_θ."""
    return Terms(-entries.advantage * entries.logprob, {})


def tis(entries: Entries, *, cap: float | None) -> Terms:
    """−sg(min(ρ, c))·A·logπ_θ: truncated importance sampling (Munos 2016, Espeholt 2018). cap: c, None for none.

    Example: ρ = 3, c = 2, A = 1 → the gradient of −2·logπ_θ.
    """
    weight = _ratio_to_behavior(entries)
    cut = weight > cap if cap is not None else torch.zeros_like(entries.mask)
    return Terms(
        -torch.where(cut, cap or 0.0, weight) * entries.advantage * entries.logprob, {"truncated_fraction": cut.float()}
    )


def cispo(entries: Entries, *, clip_low: float, clip_high: float) -> Terms:
    """−sg(clip(ρ, 1−ε_lo, 1+ε_hi))·A·logπ_θ (MiniMax-M1, Chen 2025): bounded on both sides, no gradient is lost.

    clip_low = 1 is no lower bound, as the paper has it.
    """
    weight = _ratio_to_behavior(entries)
    clipped = weight.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Terms(-clipped * entries.advantage * entries.logprob, {"truncated_fraction": (clipped != weight).float()})


def topr(entries: Entries, *, cap: float, positive_weight: float, negative_weight: float) -> Terms:
    """−w₊·A·logπ_θ where A > 0, −w₋·sg(min(ρ, c))·A·logπ_θ elsewhere (Roux 2025; weighted: ROLL Flash, takeaway 4).

    What went well is imitated whoever did it; what went badly is unlearned as far as the policy still does it.
    Deviation: the sign of the advantage decides for each entry, where the paper splits whole trajectories by their
    return. Weights of 1 are plain TOPR.
    """
    ratio, good = _ratio_to_behavior(entries), entries.advantage > 0
    cut = ~good & (ratio > cap)
    weight = torch.where(good, positive_weight, negative_weight * ratio.clamp(max=cap))
    return Terms(-weight * entries.advantage * entries.logprob, {"truncated_fraction": cut.float()})


def _clipped(ratio: Tensor, entries: Entries, clip_low: float, clip_high: float) -> Terms:
    """PPO's surrogate of this ratio."""
    plain = -entries.advantage * ratio
    bounded = -entries.advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return Terms(torch.maximum(plain, bounded), {"clip_fraction": (bounded > plain).float()})


def _ratio_to_behavior(entries: Entries) -> Tensor:
    """ρ = π_θ/π_b per entry, without gradient."""
    return torch.exp(log_ratio(entries.logprob, entries.behavior)).detach()


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": ppo,
        "decoupled_ppo": decoupled_ppo,
        "gspo": gspo,
        "vanilla": vanilla,
        "tis": tis,
        "cispo": cispo,
        "topr": topr,
    }
)
