"""Random entries, and every loss with usual settings."""

from __future__ import annotations

import inspect

import torch

from polyrhythm.algorithms.losses import POLICY_LOSSES, LossInput, LossOutput

USUAL = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "behave_weight_threshold": 2.0,
    "cap": 1.0,
    "positive_weight": 1.0,
    "negative_weight": 1.0,
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "kl_coef": 1.0,
    "sigma": 0.5,
}


def entries(shape: tuple[int, ...] = (40, 3), *, spread: float = 0.8, seed: int = 0) -> LossInput:
    """Random entries in float64 with ratios far enough from 1 that every branch is taken."""
    rng = torch.Generator().manual_seed(seed)
    behavior, move, drift, advantage = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(4))
    proximal = behavior + 0.5 * spread * drift
    return LossInput(proximal + spread * move, proximal, behavior, advantage, torch.ones(shape, dtype=torch.bool))


def loss_named(name: str, e: LossInput) -> LossOutput:
    """Every loss with usual settings; a new one need only appear in the table. Losses with a selection rule: none."""
    loss = POLICY_LOSSES[name]
    if e.selected is None:
        e = e._replace(selected=torch.zeros_like(e.mask))
    return loss(e, **{k: v for k, v in USUAL.items() if k in inspect.signature(loss).parameters})
