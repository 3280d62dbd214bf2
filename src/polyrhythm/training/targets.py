"""Targets of an update: bootstrap values, advantages, returns, proximal log-probs, weights of entries.

All are computed once per update, before the first optimizer step, without gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from polyrhythm.algorithms import advantages, aggregation, levels, rollout_correction
from polyrhythm.algorithms.divergence import k3, kl_estimate
from polyrhythm.algorithms.metrics import explained_variance
from polyrhythm.algorithms.proximal import interpolation
from polyrhythm.algorithms.sums import Total
from polyrhythm.errors import ConfigError
from polyrhythm.policies.base import Policy, extended
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.batch import MicroBatchLimits, PackedBatch, TrainingBatch, slices
from polyrhythm.training.moments import Reference
from polyrhythm.training.objective import advantage_estimate
from polyrhythm.training.ranks import ONE_RANK, Ranks
from polyrhythm.training.steps import Metrics, PhaseTimes

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings


_Found = TypeVar("_Found")

#: Divergence between generators and trainer for the same weights.
MISMATCH = "train/actor/mismatch_kl"
#: Share of samples whose advantages are all 0, where groups are compared (`plugins.alarms`).
_ZERO_ADVANTAGE = "train/actor/zero_advantage_fraction"


class TargetInputs(NamedTuple):
    """Inputs of the targets besides the batch: the policy at the update's start, on `device`, and the frozen reference,
    if any.

    produced: updates in the weights that this update makes; micro_batch: rows per forward pass (0: all at once);
    tokens: maximum of a pass that evaluates messages (0: no limit). counts: N and M of the whole update, if the batch
    is one rank's part of it. own_version: version of the update's initial weights, if generators could have them and
    not all samples are theirs. token_versions: the log-prob of a token depends on the weights of its version alone.
    reward_scale: factor on the environment's rewards. sync_interval: updates of a version.
    """

    policy: Policy
    reference: Reference | None
    produced: int
    micro_batch: int
    device: torch.device
    ranks: Ranks = ONE_RANK
    counts: tuple[int, int] | None = None
    tokens: int = 0
    own_version: int | None = None
    token_versions: bool = False
    reward_scale: float = 1.0
    sync_interval: int = 1


class Recomputed(NamedTuple):
    """The policy's current log-probs [N,C,A] and values ([N] or [N,C]) of the batch's actions, on the host."""

    logprob: Tensor
    value: Tensor


@torch.no_grad()
def compute_targets(
    packed: PackedBatch, algorithm: AlgorithmSettings, inputs: TargetInputs, times: PhaseTimes | None = None
) -> tuple[TrainingBatch, Metrics]:
    """The update's training batch on the host, and metrics of its targets. times: a pass that recomputes log-probs is
    the phase "proximal"."""
    _check_value_shape(packed, algorithm)
    packed, shaping = _penalise_overlong(packed, algorithm, inputs.ranks.total)
    late = algorithm.uses_value and policy_traits(inputs.policy).values_late
    recomputed = evaluate(packed, inputs.policy, inputs) if algorithm.recomputes else None
    if recomputed is not None and times is not None:
        times.end("proximal")
    if late:
        packed = replace(packed, value=recomputed.value if recomputed else late_values(packed, inputs))
    reference = evaluate(packed, inputs.reference, inputs).logprob if inputs.reference is not None else None
    estimate = estimate_advantages(packed, algorithm, inputs, recomputed, reference)
    value_mask = levels.reward_mask(packed.valid, algorithm.reward_level)
    advantage = estimate.advantages
    if algorithm.whitens:
        std = algorithm.advantage_std
        advantage = advantages.normalize(advantage, value_mask, std=std, total=inputs.ranks.total)
    if algorithm.advantage_clip is not None:
        advantage = advantage.clamp(-algorithm.advantage_clip, algorithm.advantage_clip)
    mask = levels.mask(packed.valid, algorithm.logprob_level, packed.logprob.shape[-1])
    behavior = _at_level(packed.logprob, packed, algorithm)
    proximal = behavior if recomputed is None else _at_level(recomputed.logprob, packed, algorithm)
    correction, counted, metrics = _correct(
        algorithm, rollout_correction.Entries(proximal, behavior, mask, packed.trajectory), inputs.ranks.total
    )
    metrics |= shaping
    if algorithm.needs_groups:
        metrics |= _zero_advantage(estimate.advantages, value_mask, packed, inputs.ranks.total)
    if recomputed is not None and inputs.own_version is not None:
        metrics |= mismatch(packed, (behavior, proximal), algorithm, inputs, inputs.own_version)
    batch = TrainingBatch(
        obs=packed.obs,
        forward_inputs=packed.forward_inputs,
        valid=packed.valid,
        behavior=behavior,
        proximal=proximal,
        advantage=levels.spread(advantage, mask),
        weight=_weights(counted, packed, algorithm, inputs.counts),
        old_value=packed.value,
        returns=estimate.returns,
        value_mask=value_mask,
        value_weight=_weights(value_mask, packed, algorithm, inputs.counts)
        if algorithm.value.aggregation == "policy"
        else None,
        reference=None if reference is None else _at_level(reference, packed, algorithm),
        alpha=interpolation(_versions(packed, algorithm) * inputs.sync_interval, inputs.produced)
        if algorithm.interpolates
        else None,
        correction=correction,
    )
    if algorithm.scales_rewards:
        metrics["train/critic/reward_scale"] = inputs.reward_scale
    if algorithm.uses_value:
        explained = explained_variance(packed.value, estimate.returns, value_mask, inputs.ranks.total)
        metrics["train/critic/explained_variance"] = float(explained)
    return batch, metrics


def estimate_advantages(
    packed: PackedBatch,
    algorithm: AlgorithmSettings,
    inputs: TargetInputs,
    recomputed: Recomputed | None,
    reference: Tensor | None,
) -> advantages.Advantages:
    """Advantages and returns at reward level, by `algorithm.advantage`. reference: log-probs [N,C,A]."""
    level = algorithm.reward_level
    rewards = levels.reduce_rewards(packed.rewards, packed.valid, level) * inputs.reward_scale
    penalty = torch.zeros_like(rewards)
    if reference is not None and algorithm.kl.place == "reward":
        kl = kl_estimate(packed.logprob, reference, algorithm.kl.estimator, algorithm.kl.cap)
        penalty = -algorithm.kl.coef * levels.reduce(kl, packed.valid, level).to(rewards.dtype)
    log_ratio = torch.zeros_like(rewards)
    if recomputed is not None:
        log_ratio = levels.reduce(recomputed.logprob - packed.logprob, packed.valid, level).to(rewards.dtype)
    bootstrap = torch.zeros(packed.terminated.shape, dtype=packed.value.dtype)
    values = torch.zeros_like(rewards)
    if algorithm.uses_value:
        bootstrap, values = bootstrap_values(packed, algorithm, inputs), packed.value
    if recomputed is not None and algorithm.advantage.type == "v_trace":
        values = recomputed.value
    samples = advantages.AdvantageInput(
        rewards=rewards + penalty,
        penalty=penalty,
        values=values,
        valid=levels.reward_mask(packed.valid, level),
        log_ratio=log_ratio,
        trajectory=packed.trajectory,
        bootstrap=bootstrap,
        group=packed.group,
    )
    return advantage_estimate(algorithm)(samples)


def bootstrap_values(packed: PackedBatch, algorithm: AlgorithmSettings, inputs: TargetInputs) -> Tensor:
    """Value [M] after each trajectory's end: V(final observation) if `algorithm.bootstrap` adds it, else 0. Only those
    observations are evaluated; of a value per action ([M,C]) the first is taken."""
    needed = advantages.needs_bootstrap(packed.terminated, packed.truncated, algorithm.bootstrap)
    out = torch.zeros(needed.shape, dtype=packed.value.dtype)
    index = needed.nonzero().squeeze(1)
    obs = {name: x.index_select(0, index) for name, x in packed.final_obs.items()}
    # As many tokens as if the last action were evaluated once more: an observation alone has fewer.
    last = torch.searchsorted(packed.trajectory, index, right=True) - 1
    inputs_of_last = {name: x.index_select(0, last) for name, x in packed.forward_inputs.items()}
    limits = MicroBatchLimits(inputs.policy, inputs.micro_batch, inputs.tokens)
    for rows, counts in as_many_on_every_rank(limits.sizes(len(index), obs, inputs_of_last), inputs.ranks):
        value = inputs.policy.value(slices(obs if counts else packed.final_obs, rows, inputs.device))
        if counts:
            out[index[rows]] = (value if value.dim() == 1 else value[:, 0]).to(out)
    return out


def evaluate(packed: PackedBatch, policy: Reference, inputs: TargetInputs) -> Recomputed:
    """One forward pass of `policy` over the batch, in micro-batches."""
    pieces = [
        (found.logprob.to(packed.logprob.device), found.value.to(packed.value))
        for found in _over_batch(packed, policy.evaluate, inputs)
    ]
    return Recomputed(torch.cat([logprob for logprob, _ in pieces]), torch.cat([value for _, value in pieces]))


def late_values(packed: PackedBatch, inputs: TargetInputs) -> Tensor:
    """The values ([N] or [N,C]) of a policy whose values come late, by its `late_values` if it has one,
    which computes only them."""
    if not policy_traits(inputs.policy).late_values:
        return evaluate(packed, inputs.policy, inputs).value
    call = extended(inputs.policy).late_values
    return torch.cat([value.to(packed.value) for value in _over_batch(packed, call, inputs)])


def _over_batch(packed: PackedBatch, call: Callable[..., _Found], inputs: TargetInputs) -> Iterator[_Found]:
    """Results of `call` for each micro-batch's observations and forward inputs, equally many on every rank."""
    limits = MicroBatchLimits(inputs.policy, inputs.micro_batch, inputs.tokens)
    sizes = limits.sizes(packed.chunk_steps, packed.obs, packed.forward_inputs)
    for rows, counts in as_many_on_every_rank(sizes, inputs.ranks):
        found = call(slices(packed.obs, rows, inputs.device), slices(packed.forward_inputs, rows, inputs.device))
        if counts:
            yield found


def as_many_on_every_rank(sizes: Sequence[int], ranks: Ranks) -> Iterator[tuple[slice, bool]]:
    """Row slices of passes of these sizes, each with whether it counts. With shard each pass gathers weights, so a rank
    with fewer passes than others ends with some over its first row."""
    end = 0
    for number in range(ranks.most(len(sizes))):
        if number < len(sizes):
            start, end = end, end + sizes[number]
            yield slice(start, end), True
        else:
            yield slice(0, 1), False


def _at_level(logprob: Tensor, packed: PackedBatch, algorithm: AlgorithmSettings) -> Tensor:
    return levels.reduce(logprob, packed.valid, algorithm.logprob_level)


def _versions(packed: PackedBatch, algorithm: AlgorithmSettings) -> Tensor:
    """Behaviour versions [N,C] of actions if they are known and log-probs are not summed over them; else the oldest of
    each chunk step, [N]."""
    if packed.newer is None or algorithm.logprob_level == "chunk":
        return packed.version
    return packed.version[:, None] + packed.newer


def _weights(mask: Tensor, packed: PackedBatch, algorithm: AlgorithmSettings, counts: tuple[int, int] | None) -> Tensor:
    how = algorithm.aggregation
    return aggregation.entry_weights(mask, packed.trajectory, how, valid=packed.valid, counts=counts)


def _correct(
    algorithm: AlgorithmSettings, entries: rollout_correction.Entries, total: Total
) -> tuple[Tensor | None, Tensor, Metrics]:
    """`algorithm.rollout_correction`: the factor on the loss (None: 1), the entries that count, and metrics."""
    settings, mask = algorithm.rollout_correction, entries.mask
    if not settings.active:
        return None, mask, {}
    correction = rollout_correction.correct(entries, total=total, **settings.keywords)
    weight, kept = total(correction.weight.sum()), total(correction.kept.sum())
    count = total(mask.sum()).clamp(min=1)
    metrics = {
        "train/actor/correction_weight": float(weight / kept.clamp(min=1)),
        "train/actor/correction_clip_fraction": float(total(correction.clipped.sum()) / count),
        "train/actor/rejected_fraction": float(total((mask & ~correction.kept).sum()) / count),
    }
    return correction.weight, mask if settings.count_rejected else correction.kept, metrics


def mismatch(
    packed: PackedBatch,
    logprobs: tuple[Tensor, Tensor],
    algorithm: AlgorithmSettings,
    inputs: TargetInputs,
    own_version: int,
) -> Metrics:
    """Divergence of the generators' and the trainer's `logprobs`, over entries sampled by the weights of `own_version`.
    Compares chunk steps that are entirely theirs, or tokens; no metric without any."""
    mask, total = levels.mask(packed.valid, algorithm.logprob_level, packed.logprob.shape[-1]), inputs.ranks.total
    own = (_versions(packed, algorithm) if inputs.token_versions else packed.version).eq(own_version)
    own = mask & aggregation.per_row_like(own, mask)
    count = total(own.sum())
    differences = total(k3(*logprobs)[own].sum())
    return {MISMATCH: float(differences / count)} if count else {}


def _penalise_overlong(packed: PackedBatch, algorithm: AlgorithmSettings, total: Total) -> tuple[PackedBatch, Metrics]:
    """The batch with the penalty of `algorithm.overlong` at the last token of each message, and its mean. The samples'
    own rewards, which episodes report, stay unchanged."""
    settings = algorithm.overlong
    if settings.tokens is None:
        return packed, {}
    penalty = advantages.overlong_penalty(packed.valid, tokens=settings.tokens, penalty=settings.penalty)
    last = (packed.valid.sum(1, keepdim=True) - 1).clamp(min=0)
    rewards = packed.rewards.scatter_add(1, last, penalty.to(packed.rewards.dtype).unsqueeze(1))
    columns = torch.stack([penalty, penalty < 0, packed.valid.any(1)]).double()  # no token: a rank's spare sample
    penalties, overlong, messages = total(columns.sum(1)).tolist()
    metrics = {
        "train/actor/overlong_penalty": penalties / messages,
        "train/actor/overlong_fraction": overlong / messages,
    }
    return replace(packed, rewards=rewards), metrics


def _zero_advantage(advantage: Tensor, valid: Tensor, packed: PackedBatch, total: Total) -> Metrics:
    """The share of samples whose advantages ([N] or [N,C], valid alike) are all 0, as their
    groups' returns are equal."""
    rows, samples = len(advantage), packed.terminated.shape
    nonzero = (valid & (advantage != 0)).reshape(rows, -1).any(1)
    counted = [valid.reshape(rows, -1).any(1), nonzero]
    of_samples = [torch.zeros(samples).index_add_(0, packed.trajectory, x.float()) > 0 for x in counted]
    count, informative = total(torch.stack([x.sum() for x in of_samples]).double()).tolist()
    return {_ZERO_ADVANTAGE: 1 - informative / count} if count else {}


def _check_value_shape(packed: PackedBatch, algorithm: AlgorithmSettings) -> None:
    expected = packed.valid.shape if algorithm.reward_level == "action" else packed.valid.shape[:1]
    if algorithm.uses_value and packed.value.shape != expected:
        raise ConfigError(
            f"algorithm.reward_level = {algorithm.reward_level}: it needs values of shape {tuple(expected)}, the "
            f"policy gave {tuple(packed.value.shape)}; set it to {'chunk' if packed.value.dim() == 1 else 'action'}"
        )
