"""Sums over all entries of an update, of which this process may hold a part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: A tensor → its sum over all processes that hold a part of the entries.
Total = Callable[[Tensor], Tensor]


def here(x: Tensor) -> Tensor:
    """The sum where one process holds all entries: `x` itself."""
    return x


def mean_and_variance(x: Tensor, total: Total = here) -> tuple[Tensor, Tensor]:
    """Mean and variance (divided by the count) over all entries x [n], n ≥ 0 here and ≥ 1 in all; float64 scalars.

    Chan et al. 1983: from the count, mean and variance of each part, so that equal entries have exactly no variance.
    """
    count = x.new_tensor(float(x.numel()), dtype=torch.float64)
    empty = x.numel() == 0
    mean = count.new_zeros(()) if empty else x.double().mean()
    variance = count.new_zeros(()) if empty else x.var(correction=0).double()
    sums = total(torch.stack([count, count * mean]))
    overall = sums[1] / sums[0]
    return overall, total(count * variance + count * (mean - overall).square()) / sums[0]
