"""Running statistics that training keeps, of observations and of discounted returns: count, mean and variance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.algorithms.sums import Total, here, mean_and_variance
from polyrhythm.policies.normalizer import normalizers_of


class Moments(NamedTuple):
    """Of all numbers so far. count [1]; mean, variance (divided by the count) [n]; float64."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def merged(self, x: Tensor, total: Total = here) -> Moments:
        """With the columns of `x` [n,numbers], of which other processes hold more; total: sums over all of them.

        Chan et al. 1979: of counts a, b and means μ, ν the variance is (a·var_a + b·var_b)/(a+b) + ab(μ−ν)²/(a+b)².
        """
        number = total(self.count.new_tensor([float(x.shape[-1])]))
        if not number:
            return self
        mean, variance = mean_and_variance(x, total)
        share = number / (self.count + number)
        apart = mean - self.mean
        variance = torch.lerp(self.variance, variance, share) + share * (1.0 - share) * apart.square()
        return Moments(self.count + number, self.mean + share * apart, variance)


@torch.no_grad()
def update_normalizers(policy: nn.Module, obs: Mapping[str, Tensor], rows: Tensor, total: Total = here) -> None:
    """Add observations [N,...] on the host to the policy's statistics. rows [N] bool: which of them count."""
    for normalizer in normalizers_of(policy):
        present = Moments(*(x.cpu() for x in (normalizer.count, normalizer.mean, normalizer.variance)))
        normalizer.set(*present.merged(normalizer.entries(obs)[rows].T, total))
