"""How far two policies are apart, from log-probs of the actions that one of them took.

Source: Schulman 2020, "Approximating KL divergence". With x = logπ_other − logπ of actions that π took:
k1 = −x (unbiased, noisy, may be negative), k2 = x²/2 (biased, low variance), k3 = eˣ − 1 − x (unbiased, never
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

#: Log-ratios are cut here before exp, so that one wild entry gives a huge number and not inf·0 = NaN.
LOG_RATIO_LIMIT = 20.0

Estimator = Literal["k1", "k2", "k3"]


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """new − old, within ±LOG_RATIO_LIMIT."""
    return (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(own: Tensor, other: Tensor) -> Tensor:
    """logπ − logπ_other."""
    return log_ratio(own, other)


def k2(own: Tensor, other: Tensor) -> Tensor:
    """½(logπ − logπ_other)²."""
    return 0.5 * log_ratio(own, other).square()


def k3(own: Tensor, other: Tensor) -> Tensor:
    """π_other/π − 1 − log(π_other/π)."""
    x = log_ratio(other, own)
    return torch.expm1(x) - x


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3})
