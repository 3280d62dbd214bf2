"""The optimizer, its learning rate and the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def adamw(
    module: nn.Module, *, lr: float, weight_decay: float, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; only matrices and larger decay (no biases, norms or scales)."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same learning rate for every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradient(parameters: Iterable[Tensor], largest: float | None) -> Tensor:
    """Scale gradients to a global norm of at most `largest` (None: leave them); returns the norm before, scalar."""
    return nn.utils.clip_grad_norm_(parameters, math.inf if largest is None else largest)


def linear_decay(update: int, updates: int, final_fraction: float) -> float:
    """Factor on the learning rate of update 0..updates-1: 1 at the first, final_fraction at the last and beyond."""
    done = min(update / (updates - 1), 1.0) if updates > 1 else 0.0
    return 1.0 + (final_fraction - 1.0) * done


def warmup_cosine(step: int, steps: int, warmup_steps: int) -> float:
    """Factor on the learning rate of step 0..steps-1: linear up to 1 over the warm-up, then half a cosine to 0.

    Example, 4 steps of which 2 warm up: 0.5, 1, 1, 0.5 (the 0 would come with step 4, which is not done).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup_steps) / max(steps - warmup_steps, 1)))
