"""Policy losses per entry, before aggregation.

Every loss has the form `loss(entries, *, settings by keyword) -> LossOutput` and stands in `POLICY_LOSSES` under the
name that `algorithm.loss.type` gives; its keywords are that section's fields. A new one is one function and one line in
the table, or a user's `module:function`. A loss gives one value per entry; `aggregation` weighs and sums them. Masked
entries hold zeros (`levels` makes them so).

Two families for stale data (ROLL Flash, section 2.2): clipping removes the gradient of entries outside a trust region,
weighting keeps every gradient and bounds its importance weight. Losses that clip are around π_prox (`gspo`: by choice).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import log_ratio

RatioTo = Literal["behavior", "proximal"]

#: Difference of two float32 log-probs of the same weights, in nats, that is only rounding.
ROUNDING = 1e-5


class LossInput(NamedTuple):
    """What a policy loss sees; all of one shape ([N], [N,C] or [N,C,A], see `levels`), zero where mask is False.

    logprob: logπ_θ, the only one with gradient. proximal: logπ_prox, the policy that clipping stays near (equal to
    behavior where `algorithm.proximal` is behavior). behavior: logπ_b, the policy that acted. mask: bool. selected:
    bool, the entries that the loss's own rule chose over the whole mini-batch (`selection`); None for losses without
    one.
    """

    logprob: Tensor
    proximal: Tensor
    behavior: Tensor
    advantage: Tensor
    mask: Tensor
    selected: Tensor | None = None


class LossOutput(NamedTuple):
    """Loss per entry, and metrics per entry (without gradient, same shape), logged as `train/actor/<name>`."""

    loss: Tensor
    metrics: dict[str, Tensor]


PolicyLoss = Callable[..., LossOutput]


def ppo(
    entries: LossInput, *, clip_low: float | None, clip_high: float | None, dual_clip: float | None = None
) -> LossOutput:
    """−min(rA, clip(r, 1−ε_lo, 1+ε_hi)·A), for A < 0 at most dual_clip·|A| (Schulman 2017; Ye 2020 for dual clip).

    clip_high > clip_low is DAPO's clip-higher; None is no clip on that side. dual_clip: c > 1, or None for off.
    Example: r = 2, A = 1, ε = 0.2 → −1.2. r = 5, A = −1, c = 3 → 3.
    """
    loss, metrics = _clipped(log_ratio(entries.logprob, entries.proximal).exp(), entries, clip_low, clip_high)
    if dual_clip is not None:
        ceiling = -entries.advantage * dual_clip
        hit = (entries.advantage < 0) & (loss > ceiling)
        loss = torch.where(hit, ceiling, loss)
        metrics["dual_clip_fraction"] = hit.float()
    return LossOutput(loss, metrics)


def decoupled_ppo(
    entries: LossInput,
    *,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    behave_weight_threshold: float | None = None,
) -> LossOutput:
    """w·(PPO loss around π_prox) with w = π_prox/π_b (Hilton 2021; RLinf's decoupled_actor_critic).

    Entries with w > behave_weight_threshold (None: off) contribute nothing, but still count in the normaliser.
    Where π_prox = π_b this is `ppo`, bit-equal.
    """
    inner = ppo(entries, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = torch.exp(log_ratio(entries.proximal, entries.behavior)).detach()
    if behave_weight_threshold is None:
        return LossOutput(weight * inner.loss, inner.metrics)
    dropped = weight > behave_weight_threshold
    loss = torch.where(dropped, 0.0, weight) * inner.loss
    return LossOutput(loss, inner.metrics | {"behav_clip_fraction": dropped.float()})


def gspo(
    entries: LossInput, *, clip_low: float | None, clip_high: float | None, ratio_to: RatioTo = "behavior"
) -> LossOutput:
    """`ppo` with one ratio ρ for a whole sequence: exp of the mean log-ratio of its entries (Zheng 2025).

    A sequence is one chunk step: all tokens of a language model's answer (C tokens, A = 1), all entries of a robot's
    action chunk. At level chunk there is one entry, and this is `ppo` with that ratio.
    Example: log-ratios (0.4, 0.0) → ρ = exp(0.2) for both.
    """
    x = log_ratio(entries.logprob, _old(entries, ratio_to))
    if x.dim() > 1:
        axes = tuple(range(1, x.dim()))
        count = entries.mask.sum(axes, keepdim=True).clamp(min=1)
        x = (torch.where(entries.mask, x, 0.0).sum(axes, keepdim=True) / count).expand_as(x)
    return _clipped(x.exp(), entries, clip_low, clip_high)


def sapo(entries: LossInput, *, tau_positive: float, tau_negative: float, ratio_to: RatioTo = "proximal") -> LossOutput:
    """−(4/τ)·σ(τ(ρ−1))·A, τ = τ₊ where A > 0, else τ₋: a soft clip of the ratio (SAPO, Gao et al. 2025).

    The gradient is that of −ρA at ρ = 1 and decays to both sides, the faster the larger τ.
    Example: ρ = 1, τ = 1, A = 1 → −2, with slope −1 in ρ.
    """
    ratio = log_ratio(entries.logprob, _old(entries, ratio_to)).exp()
    tau = torch.full_like(entries.advantage, tau_negative).masked_fill(entries.advantage > 0, tau_positive)
    return LossOutput(-(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * entries.advantage, {})


def gipo(entries: LossInput, *, sigma: float, ratio_to: RatioTo = "behavior") -> LossOutput:
    """−sg(w)·ρA with w = exp(−½(log ρ/σ)²): a trust weight in place of a clip (GIPO, Lu et al. 2026).

    The gradient is −wρA·∇logπ_θ, largest at log ρ = σ² and never zero. w and ρ are one exponential, so that neither
    overflows. Example: log ρ = 0.5, σ = 0.5, A = 1 → −exp(0.5 − 0.5) = −1.
    """
    x = log_ratio(entries.logprob, _old(entries, ratio_to))
    damping = 0.5 * (x.detach() / sigma).square()
    return LossOutput(-entries.advantage * torch.exp(x - damping), {"trust_weight": torch.exp(-damping)})


def clip_cov(entries: LossInput, *, clip_low: float | None, clip_high: float | None) -> LossOutput:
    """`ppo` without the loss of the selected entries, whose covariance of A and logπ is large (Cui 2025, Clip-Cov)."""
    inner = ppo(entries, clip_low=clip_low, clip_high=clip_high)
    chosen = _selected(entries)
    loss = torch.where(chosen, 0.0, inner.loss)
    return LossOutput(loss, inner.metrics | {"cov_clip_fraction": chosen.float()})


def kl_cov(entries: LossInput, *, kl_coef: float) -> LossOutput:
    """−rA, for the selected entries −rA + kl_coef·|logπ_θ − logπ_prox| (Cui 2025, KL-Cov); nothing is clipped.

    Deviation: a difference below ROUNDING has no penalty, or rounding would set the sign of its gradient at the first
    optimizer step of an update, where π_θ is π_prox.
    """
    chosen = _selected(entries)
    loss = -entries.advantage * log_ratio(entries.logprob, entries.proximal).exp()
    distance = (entries.logprob - entries.proximal).abs()
    penalty = kl_coef * torch.where(distance > ROUNDING, distance, 0.0)
    return LossOutput(torch.where(chosen, loss + penalty, loss), {"cov_kl_fraction": chosen.float()})


def m2po(
    entries: LossInput,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    ratio_to: RatioTo = "behavior",
) -> LossOutput:
    """−ρA without the selected entries, those that hold the second moment of log(π_prox/π_b) above its threshold.

    Zheng et al. 2025 (M2PO): that mask is the trust region; clip_low and clip_high add PPO's clip (AReaL keeps it).
    """
    inner = _clipped(log_ratio(entries.logprob, _old(entries, ratio_to)).exp(), entries, clip_low, clip_high)
    chosen = _selected(entries)
    loss = torch.where(chosen, 0.0, inner.loss)
    return LossOutput(loss, inner.metrics | {"m2_masked_fraction": chosen.float()})


def vanilla(entries: LossInput) -> LossOutput:
    """−A·logπ_θ (Williams 1992, REINFORCE): no correction for staleness, right only where π_b = π_θ."""
    return LossOutput(-entries.advantage * entries.logprob, {})


def tis(entries: LossInput, *, cap: float | None, floor: float = 0.0, ratio_to: RatioTo = "behavior") -> LossOutput:
    """−sg(clip(ρ, floor, cap))·A·logπ_θ: truncated importance sampling (Munos 2016, Espeholt 2018). cap None: none.

    Example: ρ = 3, cap = 2, A = 1 → the gradient of −2·logπ_θ.
    """
    weight = _importance_weight(entries, ratio_to)
    cut = weight > cap if cap is not None else torch.zeros_like(entries.mask)
    bounded = torch.where(cut, cap or 0.0, weight)
    if floor:
        cut, bounded = cut | (weight < floor), bounded.clamp(min=floor)
    return LossOutput(-bounded * entries.advantage * entries.logprob, {"truncated_fraction": cut.float()})


def cispo(entries: LossInput, *, clip_low: float, clip_high: float, ratio_to: RatioTo = "behavior") -> LossOutput:
    """−sg(clip(ρ, 1−ε_lo, 1+ε_hi))·A·logπ_θ (MiniMax-M1, Chen 2025): bounded on both sides, no gradient is lost.

    clip_low = 1 is no lower bound, as in the paper.
    """
    weight = _importance_weight(entries, ratio_to)
    clipped = weight.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -clipped * entries.advantage * entries.logprob
    return LossOutput(loss, {"truncated_fraction": (clipped != weight).float()})


def topr(
    entries: LossInput,
    *,
    cap: float,
    positive_weight: float,
    negative_weight: float,
    ratio_to: RatioTo = "behavior",
) -> LossOutput:
    """−w₊·A·logπ_θ where A > 0, −w₋·sg(min(ρ, c))·A·logπ_θ elsewhere (Roux 2025; weighted: ROLL Flash, takeaway 4).

    Successes are imitated whichever policy acted; failures are unlearned only as far as the policy still does them.
    Deviation: the sign of the advantage decides for each entry; the paper splits whole trajectories by their return.
    Weights of 1 are plain TOPR.
    """
    ratio, good = _importance_weight(entries, ratio_to), entries.advantage > 0
    cut = ~good & (ratio > cap)
    weight = torch.where(good, positive_weight, negative_weight * ratio.clamp(max=cap))
    return LossOutput(-weight * entries.advantage * entries.logprob, {"truncated_fraction": cut.float()})


def _clipped(ratio: Tensor, entries: LossInput, clip_low: float | None, clip_high: float | None) -> LossOutput:
    """PPO's surrogate of this ratio; None is no clip on that side."""
    plain = -entries.advantage * ratio
    if clip_low is None and clip_high is None:
        return LossOutput(plain, {"clip_fraction": torch.zeros_like(plain.detach())})
    lowest = None if clip_low is None else 1.0 - clip_low
    highest = None if clip_high is None else 1.0 + clip_high
    bounded = -entries.advantage * ratio.clamp(lowest, highest)
    return LossOutput(torch.maximum(plain, bounded), {"clip_fraction": (bounded > plain).float()})


def _old(entries: LossInput, ratio_to: RatioTo) -> Tensor:
    """Log-probs of the policy in the ratio's denominator."""
    return entries.behavior if ratio_to == "behavior" else entries.proximal


def _importance_weight(entries: LossInput, ratio_to: RatioTo) -> Tensor:
    """ρ = π_θ/π_b or π_θ/π_prox per entry, without gradient."""
    return torch.exp(log_ratio(entries.logprob, _old(entries, ratio_to))).detach()


def _selected(entries: LossInput) -> Tensor:
    assert entries.selected is not None, "this loss needs a selection rule"
    return entries.selected


POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": ppo,
        "decoupled_ppo": decoupled_ppo,
        "gspo": gspo,
        "sapo": sapo,
        "gipo": gipo,
        "clip_cov": clip_cov,
        "kl_cov": kl_cov,
        "m2po": m2po,
        "vanilla": vanilla,
        "tis": tis,
        "cispo": cispo,
        "topr": topr,
    }
)
