"""From a packed batch to what the losses need: values at cut ends, advantages, proximal log-probs, weights.

All of it once per update, before the first optimizer step, without gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyrhythm.algorithms import advantages, aggregation, levels
from polyrhythm.algorithms.figures import explained_variance
from polyrhythm.errors import ConfigError
from polyrhythm.policies.base import Policy
from polyrhythm.training.batch import Decisions, Packed, slices

if TYPE_CHECKING:
    from polyrhythm.config.learning import AlgorithmSettings


@torch.no_grad()
def prepare(
    packed: Packed, policy: Policy, algorithm: AlgorithmSettings, *, micro_batch: int, device: torch.device
) -> tuple[Decisions, Tensor]:
    """The update's decisions on the host, and the explained variance of the behaviour values (scalar).

    micro_batch: rows per forward pass of the policy, which lives on `device`; 0: all at once.
    """
    _check_value_shape(packed, algorithm)
    value_mask = levels.reward_mask(packed.valid, algorithm.reward_level)
    estimate = advantages.gae(
        levels.reduce_rewards(packed.rewards, packed.valid, algorithm.reward_level),
        packed.value,
        value_mask,
        packed.trajectory,
        bootstrap_values(packed, policy, algorithm, micro_batch=micro_batch, device=device),
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )
    advantage = estimate.advantages if algorithm.advantage == "gae" else group_advantages(packed, value_mask)
    if algorithm.normalize_advantage:
        advantage = advantages.normalize(advantage, value_mask)
    entries = levels.mask(packed.valid, algorithm.logprob_level, packed.logprob.shape[-1])
    behavior = levels.reduce(packed.logprob, packed.valid, algorithm.logprob_level)
    proximal = behavior
    if algorithm.proximal == "recompute":
        recomputed = evaluate_logprob(packed, policy, micro_batch=micro_batch, device=device)
        proximal = levels.reduce(recomputed, packed.valid, algorithm.logprob_level)
    decisions = Decisions(
        obs=packed.obs,
        forward_inputs=packed.forward_inputs,
        valid=packed.valid,
        behavior=behavior,
        proximal=proximal,
        advantage=levels.spread(advantage, entries),
        weight=aggregation.entry_weights(entries, packed.trajectory, algorithm.aggregation),
        old_value=packed.value,
        returns=estimate.returns,
        value_mask=value_mask,
    )
    return decisions, explained_variance(packed.value, estimate.returns, value_mask)


def group_advantages(packed: Packed, value_mask: Tensor) -> Tensor:
    """GRPO's advantage of a trajectory's return, at all its entries: shaped like `value_mask`."""
    earned = levels.reduce_rewards(packed.rewards, packed.valid, "chunk")
    returns = earned.new_zeros(packed.group.shape).index_add_(0, packed.trajectory, earned)
    return levels.spread(advantages.grpo(returns, packed.group)[packed.trajectory], value_mask)


def bootstrap_values(
    packed: Packed, policy: Policy, algorithm: AlgorithmSettings, *, micro_batch: int, device: torch.device
) -> Tensor:
    """Value [M] behind each trajectory's end: V(final observation) where it goes on, 0 elsewhere.

    Only those observations are evaluated; a value per action ([M,C]) gives its first.
    """
    goes_on = advantages.bootstrapped(packed.terminated, packed.truncated, algorithm.bootstrap)
    out = torch.zeros(goes_on.shape, dtype=packed.value.dtype)
    index = goes_on.nonzero().squeeze(1)
    obs = {name: x.index_select(0, index) for name, x in packed.final_obs.items()}
    size = micro_batch or len(index)
    for start in range(0, len(index), size or 1):
        value = policy.value(slices(obs, slice(start, start + size), device))
        first = value if value.dim() == 1 else value[:, 0]
        out[index[start : start + size]] = first.to(out)
    return out


def evaluate_logprob(packed: Packed, policy: Policy, *, micro_batch: int, device: torch.device) -> Tensor:
    """logprob [N,C,A] of the batch's actions under the policy's present weights, on the host."""
    size = micro_batch or packed.decisions
    pieces = []
    for start in range(0, packed.decisions, size):
        rows = slice(start, start + size)
        obs, inputs = slices(packed.obs, rows, device), slices(packed.forward_inputs, rows, device)
        pieces.append(policy.evaluate(obs, inputs).logprob.to(packed.logprob.device))
    return torch.cat(pieces)


def _check_value_shape(packed: Packed, algorithm: AlgorithmSettings) -> None:
    wanted = packed.valid.shape if algorithm.reward_level == "action" else packed.valid.shape[:1]
    if packed.value.shape != wanted:
        raise ConfigError(
            f"algorithm.reward_level {algorithm.reward_level} needs values of shape {tuple(wanted)}, the policy gave "
            f"{tuple(packed.value.shape)}: set it to {'chunk' if packed.value.dim() == 1 else 'action'}"
        )
