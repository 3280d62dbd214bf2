"""Slow references in float64: plain loops over entries, written from the formulas, sharing no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gae_of_one(rewards: list[float], values: list[float], bootstrap: float, gamma: float, lam: float) -> list[float]:
    """A_t as the explicit sum Σ_l (γλ)^l δ_{t+l} over one trajectory of valid entries."""
    after = [*values[1:], bootstrap]
    delta = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


def ppo_entry(
    logp: float, prox: float, adv: float, low: float, high: float, dual: float | None
) -> tuple[float, float, float]:
    """(loss, clipped?, dual-clipped?) of one entry."""
    ratio = math.exp(logp - prox)
    bounded = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * adv, bounded * adv)
    clipped = float(bounded * adv < ratio * adv)
    if dual is not None and adv < 0 and objective < dual * adv:
        return -dual * adv, clipped, 1.0
    return -objective, clipped, 0.0


def decoupled_entry(
    logp: float, prox: float, behav: float, adv: float, low: float, high: float, dual: float | None, most: float | None
) -> float:
    weight = math.exp(prox - behav)
    if most is not None and weight > most:
        return 0.0
    return weight * ppo_entry(logp, prox, adv, low, high, dual)[0]


def value_entry(value: float, old: float, target: float, clip: float | None, huber: float | None) -> float:
    def cost(error: float) -> float:
        if huber is not None and abs(error) > huber:
            return huber * (abs(error) - huber / 2)
        return error * error / 2

    if clip is None:
        return cost(value - target)
    near = old + min(max(value - old, -clip), clip)
    return max(cost(value - target), cost(near - target))


def loop(shape: torch.Size, entry: object, *tensors: Tensor | float | None) -> Tensor:
    """`entry` applied to every position of float64 tensors; other arguments are passed as they are."""
    flat = [x.double().flatten().tolist() if isinstance(x, Tensor) else x for x in tensors]
    count = math.prod(shape)
    out = [entry(*(x[i] if isinstance(x, list) else x for x in flat)) for i in range(count)]  # type: ignore[operator]
    return torch.tensor(out, dtype=torch.float64).reshape(shape)
