"""Metrics of an update: divergence between the policies involved, and how well the values predict the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import k3, log_ratio
from polyrhythm.algorithms.losses import LossInput
from polyrhythm.algorithms.sums import Total, here, mean_and_variance


def policy_divergence(entries: LossInput, *, has_proximal: bool) -> dict[str, Tensor]:
    """Ratio and approximate KL divergences per entry, without gradient; KL by k3.

    has_proximal: π_prox is a policy of its own. Then: ratio π_θ/π_prox, proximal_approx_kl = KL(π_prox ‖ π_θ) (the
    update's own change) and behav_approx_kl = KL(π_b ‖ π_prox) (staleness). Otherwise: ratio π_θ/π_b and
    approx_kl = KL(π_b ‖ π_θ) (both together).
    """
    logprob = entries.logprob.detach()
    if not has_proximal:
        return {"ratio": log_ratio(logprob, entries.behavior).exp(), "approx_kl": k3(entries.behavior, logprob)}
    return {
        "ratio": log_ratio(logprob, entries.proximal).exp(),
        "proximal_approx_kl": k3(entries.proximal, logprob),
        "behav_approx_kl": k3(entries.behavior, entries.proximal),
    }


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor, total: Total = here) -> Tensor:
    """1 − Var(R − V)/Var(R) over the valid entries: 1 perfect, 0 as good as a constant. 0 where all R are equal.

    total: sums over all parts of an update.
    """
    target = returns[valid]
    rows = torch.stack([target, target - values[valid]])
    variance, residual = mean_and_variance(rows, total)[1].to(returns.dtype).unbind()
    return torch.where(variance > 0, 1.0 - residual / variance.clamp_min(1e-30), 0.0)
