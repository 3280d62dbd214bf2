"""Sums over all entries of an update, of which this process may hold a part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: A tensor → its sum over all processes that hold a part of the entries.
Total = Callable[[Tensor], Tensor]


def here(x: Tensor) -> Tensor:
    """`Total` of a single process that holds all entries: `x` itself."""
    return x


def mean_and_variance(x: Tensor, total: Total = here) -> tuple[Tensor, Tensor]:
    """Mean and variance (divided by the count) over all entries, the last dimension of x [...,n], n ≥ 0 here and ≥ 1 in
    all; float64 [...].

    Chan et al. 1983: from the count, mean and variance of each part. What is below the rounding error of the sums
    counts as no variance, so that equal entries have exactly none.
    """
    x = x.double()
    here_mean = x.new_zeros(x.shape[:-1])
    here_variance, count = here_mean, here_mean + x.shape[-1]
    if x.shape[-1]:
        here_mean, here_variance = x.mean(-1), x.var(-1, correction=0)
    counted, summed = total(torch.stack([count, count * here_mean])).unbind()
    mean = summed / counted
    variance = total(count * here_variance + count * (here_mean - mean).square()) / counted
    return mean, torch.where(variance <= (4 * torch.finfo(x.dtype).eps * mean).square(), 0.0, variance)
