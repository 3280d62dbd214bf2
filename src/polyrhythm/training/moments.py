"""Running statistics of observations and of discounted returns: count, mean and variance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.algorithms import levels
from polyrhythm.algorithms.advantages import discounted_sums
from polyrhythm.algorithms.sums import Total, here, mean_and_variance
from polyrhythm.policies.normalizer import EPSILON, normalizers_of
from polyrhythm.training.batch import PackedBatch

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings


class Moments(NamedTuple):
    """Count [1], mean [n] and variance (divided by the count) [n] of all numbers so far; float64."""

    seen: Tensor
    mean: Tensor
    variance: Tensor

    @staticmethod
    def of_nothing(n: int = 1) -> Moments:
        zeros = torch.zeros(n, dtype=torch.float64)
        return Moments(torch.zeros(1, dtype=torch.float64), zeros, zeros)

    @property
    def scale(self) -> float:
        """1/√(variance + 1e-8) for n = 1; 1 if all numbers are equal."""
        variance = float(self.variance)  # float32 numbers that are equal have exactly 0
        return 1.0 / sqrt(variance + EPSILON) if variance else 1.0

    def merged(self, x: Tensor, total: Total = here) -> Moments:
        """Including the columns of `x` [n,numbers], of which other processes hold more; total: sums over all of them.
        Chan et al. 1979: of counts a, b and means μ, ν the variance is (a·var_a + b·var_b)/(a+b) + ab(μ−ν)²/(a+b)²."""
        number = total(self.seen.new_tensor([float(x.shape[-1])]))
        if not number:
            return self
        mean, variance = mean_and_variance(x, total)
        share = number / (self.seen + number)
        apart = mean - self.mean
        variance = torch.lerp(self.variance, variance, share) + share * (1.0 - share) * apart.square()
        return Moments(self.seen + number, self.mean + share * apart, variance)


@torch.no_grad()
def update_normalizers(policy: nn.Module, obs: Mapping[str, Tensor], rows: Tensor, total: Total = here) -> None:
    """Add host observations [N,...] to the policy's statistics. rows [N] bool: which of them count."""
    for normalizer in normalizers_of(policy):
        present = Moments(*(x.cpu() for x in (normalizer.count, normalizer.mean, normalizer.variance)))
        normalizer.set(*present.merged(normalizer.entries(obs)[rows].T, total))


class UpdateStatistics:
    """Statistics of the samples of all updates: of observations, in the policy, and of discounted rewards, here."""

    def __init__(self, policy: nn.Module, algorithm: AlgorithmSettings, total: Total) -> None:
        self._policy, self._algorithm, self._total = policy, algorithm, total
        self._returns = self._next = Moments.of_nothing()
        self._observed = False

    @property
    def are_empty(self) -> bool:
        """Whether the policy normalises observations and has no statistics yet."""
        return any(float(normalizer.count) == 0.0 for normalizer in normalizers_of(self._policy))

    def begin(self, packed: PackedBatch, before: Callable[[], None] | None) -> bool:
        """Begin an update; whether its samples were made without any statistics of observations. If so, the statistics
        are set from these samples now, after `before`, and used for training."""
        self._observed = self.are_empty
        if self._observed:
            if before is not None:
                before()
            self._observe(packed)
        if self._algorithm.scales_rewards:
            self._next = self._returns.merged(_discounted_sums(packed, self._algorithm)[None], self._total)
        return self._observed

    @property
    def reward_scale(self) -> float:
        """Factor on the rewards of the current update."""
        return self._next.scale if self._algorithm.scales_rewards else 1.0

    def finish(self, packed: PackedBatch) -> None:
        """Add the samples of the current update to the statistics of later ones and of the next version."""
        self._returns = self._next
        if not self._observed:
            self._observe(packed)

    def state_dict(self) -> dict[str, Any]:
        """State outside the policy's weights; its tensors are replaced, never changed."""
        return {"returns": self._returns._asdict()} if self._algorithm.scales_rewards else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "returns" in state:
            self._returns = Moments(**state["returns"])

    def _observe(self, packed: PackedBatch) -> None:
        update_normalizers(self._policy, packed.obs, packed.valid.any(1), self._total)


def _discounted_sums(packed: PackedBatch, algorithm: AlgorithmSettings) -> Tensor:
    """Discounted sums [entries] of the rewards of each trajectory up to each step, at `algorithm.reward_level`.

    As in `NormalizeReward` of Gymnasium and `VecNormalize` of Stable-Baselines3, after Engstrom et al. 2020, appendix
    A.1, but for a scale of 1 if they are all equal; each segment of an episode starts anew.
    """
    level = algorithm.reward_level
    rewards = levels.reduce_rewards(packed.rewards, packed.valid, level).double()
    valid = levels.reward_mask(packed.valid, level)
    return discounted_sums(rewards, valid, packed.trajectory, len(packed.terminated), gamma=algorithm.gamma)
