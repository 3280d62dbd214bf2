"""From a packed batch to what the losses need: values at cut ends, advantages, proximal log-probs, weights.

All of it once per update, before the first optimizer step, without gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms import advantages, aggregation, levels
from polyrhythm.algorithms.divergence import KL_ESTIMATORS
from polyrhythm.algorithms.figures import explained_variance
from polyrhythm.algorithms.proximal import interpolation
from polyrhythm.errors import ConfigError
from polyrhythm.policies.base import Policy
from polyrhythm.training.batch import Decisions, Packed, slices
from polyrhythm.training.choose import advantage_estimate

if TYPE_CHECKING:
    from polyrhythm.config.algorithm import AlgorithmSettings


class Preparation(NamedTuple):
    """What targets depend on beside the batch: the policy at the update's start, on `device`; the frozen reference
    where there is one; the version that the update works on; rows per forward pass (0: all at once)."""

    policy: Policy
    reference: Policy | None
    version: int
    micro_batch: int
    device: torch.device


@torch.no_grad()
def prepare(packed: Packed, algorithm: AlgorithmSettings, by: Preparation) -> tuple[Decisions, dict[str, float]]:
    """The update's decisions on the host, and what there is to log of them."""
    _check_value_shape(packed, algorithm)
    level = algorithm.logprob_level
    asked = evaluate(packed, by.policy, by) if algorithm.recomputes else None
    reference = evaluate(packed, by.reference, by).logprob if by.reference is not None else None
    estimate = estimated(packed, algorithm, by, asked, reference)
    value_mask = levels.reward_mask(packed.valid, algorithm.reward_level)
    advantage = estimate.advantages
    if algorithm.whitens:
        advantage = advantages.normalize(advantage, value_mask)
    entries = levels.mask(packed.valid, level, packed.logprob.shape[-1])
    behavior = levels.reduce(packed.logprob, packed.valid, level)
    decisions = Decisions(
        obs=packed.obs,
        forward_inputs=packed.forward_inputs,
        valid=packed.valid,
        behavior=behavior,
        proximal=behavior if asked is None else levels.reduce(asked.logprob, packed.valid, level),
        advantage=levels.spread(advantage, entries),
        weight=aggregation.entry_weights(entries, packed.trajectory, algorithm.aggregation),
        old_value=packed.value,
        returns=estimate.returns,
        value_mask=value_mask,
        reference=None if reference is None else levels.reduce(reference, packed.valid, level),
        alpha=interpolation(packed.version, by.version) if algorithm.interpolates else None,
    )
    if not algorithm.uses_value:
        return decisions, {}
    explained = explained_variance(packed.value, estimate.returns, value_mask)
    return decisions, {"train/critic/explained_variance": float(explained)}


def estimated(
    packed: Packed, algorithm: AlgorithmSettings, by: Preparation, asked: Asked | None, reference: Tensor | None
) -> advantages.Advantages:
    """Advantages and returns at reward level, as `algorithm.advantage` says. reference: its log-probs [N,C,A]."""
    level = algorithm.reward_level
    rewards = levels.reduce_rewards(packed.rewards, packed.valid, level)
    penalty = torch.zeros_like(rewards)
    if reference is not None and algorithm.kl.place == "reward":
        distance = KL_ESTIMATORS[algorithm.kl.estimator](packed.logprob, reference)
        penalty = -algorithm.kl.coef * levels.reduce(distance, packed.valid, level).to(rewards.dtype)
    log_ratio = torch.zeros_like(rewards)
    if asked is not None:
        log_ratio = levels.reduce(asked.logprob - packed.logprob, packed.valid, level).to(rewards.dtype)
    ends = torch.zeros(packed.terminated.shape, dtype=packed.value.dtype)
    if algorithm.uses_value:
        ends = bootstrap_values(packed, algorithm, by)
    samples = advantages.Samples(
        rewards=rewards + penalty,
        penalty=penalty,
        values=asked.value if asked is not None and algorithm.advantage.type == "v_trace" else packed.value,
        valid=levels.reward_mask(packed.valid, level),
        log_ratio=log_ratio,
        trajectory=packed.trajectory,
        bootstrap=ends,
        group=packed.group,
    )
    return advantage_estimate(algorithm)(samples)


def bootstrap_values(packed: Packed, algorithm: AlgorithmSettings, by: Preparation) -> Tensor:
    """Value [M] behind each trajectory's end: V(final observation) where it goes on, 0 elsewhere.

    Only those observations are evaluated; a value per action ([M,C]) gives its first.
    """
    goes_on = advantages.bootstrapped(packed.terminated, packed.truncated, algorithm.bootstrap)
    out = torch.zeros(goes_on.shape, dtype=packed.value.dtype)
    index = goes_on.nonzero().squeeze(1)
    obs = {name: x.index_select(0, index) for name, x in packed.final_obs.items()}
    size = by.micro_batch or len(index)
    for start in range(0, len(index), size or 1):
        value = by.policy.value(slices(obs, slice(start, start + size), by.device))
        first = value if value.dim() == 1 else value[:, 0]
        out[index[start : start + size]] = first.to(out)
    return out


class Asked(NamedTuple):
    """What a policy says of the batch's actions now, on the host: logprob [N,C,A]; value [N] or [N,C]."""

    logprob: Tensor
    value: Tensor


def evaluate(packed: Packed, policy: Policy, by: Preparation) -> Asked:
    """One forward pass of `policy`, in micro-batches."""
    size = by.micro_batch or packed.decisions
    pieces = []
    for start in range(0, packed.decisions, size):
        rows = slice(start, start + size)
        obs, inputs = slices(packed.obs, rows, by.device), slices(packed.forward_inputs, rows, by.device)
        found = policy.evaluate(obs, inputs)
        pieces.append((found.logprob.to(packed.logprob.device), found.value.to(packed.value)))
    return Asked(torch.cat([logprob for logprob, _ in pieces]), torch.cat([value for _, value in pieces]))


def _check_value_shape(packed: Packed, algorithm: AlgorithmSettings) -> None:
    wanted = packed.valid.shape if algorithm.reward_level == "action" else packed.valid.shape[:1]
    if packed.value.shape != wanted:
        raise ConfigError(
            f"algorithm.reward_level {algorithm.reward_level} needs values of shape {tuple(wanted)}, the policy gave "
            f"{tuple(packed.value.shape)}: set it to {'chunk' if packed.value.dim() == 1 else 'action'}"
        )
