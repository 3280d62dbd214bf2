"""What to watch while a policy trains: drift between policies, and how well the values predict the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import k3, log_ratio
from polyrhythm.algorithms.losses import Entries


def drift(entries: Entries, *, own_proximal: bool) -> dict[str, Tensor]:
    """Per entry, without gradient, divergences by k3. own_proximal: there is a proximal policy beside the behaviour.

    With one: ratio π_θ/π_prox, KL(π_prox ‖ π_θ) (this update's own move) and KL(π_b ‖ π_prox) (staleness). Without:
    ratio π_θ/π_b and KL(π_b ‖ π_θ) (both together).
    """
    logprob = entries.logprob.detach()
    if not own_proximal:
        return {
            "ratio": log_ratio(logprob, entries.behavior).exp(),
            "behav_approx_kl": k3(entries.behavior, logprob),
        }
    return {
        "ratio": log_ratio(logprob, entries.proximal).exp(),
        "proximal_approx_kl": k3(entries.proximal, logprob),
        "behav_approx_kl": k3(entries.behavior, entries.proximal),
    }


def explained_variance(values: Tensor, returns: Tensor, valid: Tensor) -> Tensor:
    """1 − Var(R − V)/Var(R) over the valid entries: 1 perfect, 0 as good as a constant. 0 where all R are equal."""
    target = returns[valid]
    if target.numel() == 0:
        return returns.new_zeros(())
    variance = target.var(correction=0)
    residual = (target - values[valid]).var(correction=0)
    return torch.where(variance > 0, 1.0 - residual / variance.clamp_min(1e-30), 0.0)
