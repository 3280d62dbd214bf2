"""What a learner keeps beside the policy: running statistics of observations and of discounted returns (count, mean and
variance), and the reference policy of the KL term, which is the policy at the start of the first update.

A policy that shares its frozen tensors with its reference (trait shares_reference) is not copied: only the trained
tensors are kept, and swapped in while the reference is evaluated. Any other policy is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.algorithms import levels
from polyrhythm.algorithms.advantages import discounted_sums
from polyrhythm.algorithms.sums import Total, here, mean_and_variance
from polyrhythm.policies.base import Evaluation, Observations, OptionalMethods, Policy, as_module, extended
from polyrhythm.policies.form import load_published, published_state
from polyrhythm.policies.normalizer import EPSILON, normalizers_of
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.batch import PackedBatch
from polyrhythm.training.ranks import Ranks

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


class SharedReference:
    """The trained policy with the initial values of its trained tensors; the rest is the policy's own memory. During
    `evaluate` nothing else may read the policy's weights."""

    def __init__(self, policy: OptionalMethods, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self._state = policy.reference_state()

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """As the policy's, without gradient."""
        with torch.no_grad(), self._policy.as_reference(self._state):
            return self._policy.evaluate(obs, forward_inputs)

    def state_dict(self) -> dict[str, Tensor]:
        """The initial values of the trained tensors."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. ValueError: it is of another policy."""
        own = self._policy.state_dict()
        if odd := sorted(state.keys() - own.keys()):
            raise ValueError(f"the state of the reference policy has {odd[0]}, the policy does not")
        parts = {name: self._ranks.part(x, own[name]).to(own[name].device, copy=True) for name, x in state.items()}
        self._state = {name: self._ranks.join(part, own[name]) for name, part in parts.items()}


Reference = Policy | SharedReference


def room_for_copy(policy: Policy) -> Policy | None:
    """A copy of a policy before it is sharded, as it cannot be copied afterwards; None if its
    reference shares its memory."""
    return None if policy_traits(policy).shares_reference else copy.deepcopy(policy)


def make_reference(
    policy: Policy, ranks: Ranks, state: Mapping[str, Tensor] | None = None, room: Policy | None = None
) -> Reference:
    """The policy as it is now, or with the state_dict of a reference. room: from `room_for_copy`,
    sharded like the policy."""
    if policy_traits(policy).shares_reference:
        shared = SharedReference(extended(policy), ranks)
        if state is not None:
            shared.load_state_dict(state)
        return shared
    copied = copy.deepcopy(policy) if room is None else room
    module = as_module(copied).requires_grad_(requires_grad=False).eval()
    if room is not None and state is None:
        state = policy.state_dict()
    if state is not None and room is None:
        module.load_state_dict(state)
    elif state is not None:
        _fill_all(module.state_dict(), state, ranks)
    return copied


def load_weights(module: nn.Module, state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Restore published or saved tensors, whole or sharded, in a module that may be sharded. ValueError: they
    are of another policy."""
    if ranks.divides:
        _fill_all(published_state(module), state, ranks)
    else:
        load_published(module, state)


@torch.no_grad()
def _fill_all(own: Mapping[str, Tensor], state: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Overwrite tensors with those of `state`, which are whole, or sharded alike."""
    if odd := sorted(own.keys() ^ state.keys()):
        raise ValueError(f"the state does not fit the policy: {odd[0]} (and {len(odd) - 1} more) is of another policy")
    for name, x in state.items():
        found, wanted = list(x.shape), list(own[name].shape)
        if found != wanted:
            raise ValueError(f"the state does not fit the policy: {name}: the shape is {found}, it should be {wanted}")
        ranks.part(own[name]).copy_(ranks.part(x, own[name]))
