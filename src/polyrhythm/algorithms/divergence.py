"""Estimates of the KL divergence between two policies from log-probs of actions that one of them took.

Source: Schulman 2020, "Approximating KL divergence". With x = logπ_other − logπ of actions that π took:
k1 = −x (unbiased, high variance, may be negative), k2 = x²/2 (biased, low variance), k3 = eˣ − 1 − x (unbiased, never
negative). All estimate KL(π ‖ π_other).

As a loss only k2 has the divergence's own gradient in expectation; k1's expected gradient is zero, k3's is that of
the other direction KL(π_other ‖ π) (Tang and Munos 2025). As a penalty in the reward k1 is the right one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

#: Log-ratios are clamped to ± this before exp, so that one extreme entry gives a large number and not inf·0 = NaN.
LOG_RATIO_LIMIT = 20.0

Estimator = Literal["k1", "k2", "k3"]


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new − old, clamped to ±LOG_RATIO_LIMIT."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(own: Tensor, other: Tensor) -> Tensor:
    """logπ − logπ_other."""
    return own - other


def k2(own: Tensor, other: Tensor) -> Tensor:
    """½(logπ − logπ_other)²: not clamped, so that its gradient points back from any distance."""
    return 0.5 * (own - other).square()


def k3(own: Tensor, other: Tensor) -> Tensor:
    """π_other/π − 1 − log(π_other/π)."""
    x = log_ratio(other, own)
    return torch.expm1(x) - x


def kl_estimate(own: Tensor, other: Tensor, estimator: Estimator, cap: float | None = None) -> Tensor:
    """KL(π ‖ π_other) per entry. cap: largest value of k3, beyond which it has no gradient (RLinf, verl and ROLL: 10).

    Example: logπ = 0, logπ_other = 4 → k3 = e⁴ − 5 ≈ 49.6, and 10 with cap 10.
    """
    estimate = KL_ESTIMATORS[estimator](own, other)
    return estimate if cap is None else estimate.clamp(max=cap)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
