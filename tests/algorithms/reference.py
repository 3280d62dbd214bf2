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


def gspo_decision(
    logp: list[float], behav: list[float], adv: list[float], mask: list[bool], low: float, high: float
) -> list[float]:
    """Losses of the entries of one chunk step, 0 where masked."""
    moved = [x - y for x, y, seen in zip(logp, behav, mask, strict=True) if seen]
    ratio = math.exp(sum(moved) / len(moved)) if moved else 1.0
    clipped = min(max(ratio, 1 - low), 1 + high)
    return [-min(ratio * a, clipped * a) if seen else 0.0 for a, seen in zip(adv, mask, strict=True)]


def sapo_entry(logp: float, old: float, adv: float, positive: float, negative: float) -> float:
    tau = positive if adv > 0 else negative
    return -adv * 4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1)))


def gipo_entry(logp: float, old: float, adv: float, sigma: float) -> tuple[float, float]:
    """(loss, trust weight) of one entry; the loss is also its gradient, as the weight is a constant there."""
    weight = math.exp(-0.5 * ((logp - old) / sigma) ** 2)
    return -weight * math.exp(logp - old) * adv, weight


def kl_cov_entry(logp: float, prox: float, adv: float, chosen: float, coef: float) -> float:
    return -adv * math.exp(logp - prox) + (coef * abs(logp - prox) if chosen else 0.0)


def importance_weight(
    name: str, logp: float, behav: float, adv: float, settings: dict[str, float]
) -> tuple[float, float]:
    """What −A·logπ is multiplied with, and whether it was cut."""
    ratio = math.exp(logp - behav)
    if name == "tis":
        bounded = min(max(ratio, settings["floor"]), settings["cap"])
        return bounded, float(bounded != ratio)
    if name == "cispo":
        low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
        return (low, 1.0) if ratio < low else (high, 1.0) if ratio > high else (ratio, 0.0)
    if name == "topr":
        if adv > 0:
            return settings["positive_weight"], 0.0
        cap = settings["cap"]
        return settings["negative_weight"] * min(ratio, cap), float(ratio > cap)
    assert name == "vanilla"
    return 1.0, 0.0


def v_trace_of_one(
    rewards: list[float],
    values: list[float],
    ratios: list[float],
    bootstrap: float,
    gamma: float,
    lam: float,
    caps: tuple[float, float],
) -> tuple[list[float], list[float]]:
    """Advantages and targets of one trajectory: the targets as the paper's sum (Espeholt 2018, equation 1)."""
    after = [*values[1:], bootstrap]
    targets = []
    for s in range(len(rewards)):
        target = values[s]
        for t in range(s, len(rewards)):
            traces = math.prod(lam * min(caps[1], ratios[i]) for i in range(s, t))
            delta = min(caps[0], ratios[t]) * (rewards[t] + gamma * after[t] - values[t])
            target += gamma ** (t - s) * traces * delta
        targets.append(target)
    following = [*targets[1:], bootstrap]
    return [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)], targets


def group_score(name: str, own: int, scores: list[float], groups: list[int]) -> float:
    """The advantage of trajectory `own` by its group: grpo with each kind of std, rloo, maxrl, or without any scale."""
    mine = [score for score, group in zip(scores, groups, strict=True) if group == groups[own]]
    mean = sum(mine) / len(mine)
    if name == "rloo":
        return scores[own] - (sum(mine) - scores[own]) / (len(mine) - 1) if len(mine) > 1 else 0.0
    if name == "maxrl":
        return (scores[own] - mean) / (sum(abs(x) for x in mine) / len(mine))
    if name in ("none", "mean"):
        return scores[own] - mean
    freedom = max(len(mine) - 1, 1) if name == "sample" else len(mine)
    return (scores[own] - mean) / ((sum((x - mean) ** 2 for x in mine) / freedom) ** 0.5 + 1e-6)


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
