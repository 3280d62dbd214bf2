"""Importance weights π_prox/π_b of the policy loss, and rejection of entries where the two policies are too far apart.

π_b acted, in the generator's engine and possibly with older weights; π_prox is the trainer's policy at the update's
start. Computed once per update, over all its entries. Conventions of verl (`rollout_correction`), AReaL
(`rejection_sampling`), TRL (`vllm_importance_sampling_mode`) and ROLL (`train_infer_correction`); their language-model
sequence corresponds to a trajectory here, or to a chunk step.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.divergence import LOG_RATIO_LIMIT, k2, k3
from polyrhythm.algorithms.sums import Total, here

Level = Literal["token", "chunk_step", "trajectory"]
Reduction = Literal["sum", "mean", "max"]


class Correction(NamedTuple):
    """weight: factor on the loss per entry, 0 where rejected or masked; kept: bool, valid and not rejected; clipped:
    bool, where the weight was clamped. All shaped like the entries."""

    weight: Tensor
    kept: Tensor
    clipped: Tensor


class Entries(NamedTuple):
    """proximal, behavior: log-probs at the loss's level, [N], [N,C] or [N,C,A]; mask: bool, likewise; trajectory:
    [N]."""

    proximal: Tensor
    behavior: Tensor
    mask: Tensor
    trajectory: Tensor


def correct(  # noqa: PLR0913 (one keyword per setting)
    entries: Entries,
    *,
    weight: Literal["none", "token", "chunk_step", "trajectory"] = "none",
    weight_by: Literal["product", "geometric_mean"] = "product",
    weight_min: float | None = None,
    weight_max: float | None = None,
    normalize: bool = False,
    reject: Literal["none", "ratio", "k2", "k3"] = "none",
    reject_level: Level = "token",
    reject_by: Reduction = "mean",
    reject_below: float | None = None,
    reject_above: float | None = None,
    total: Total = here,
) -> Correction:
    """Importance weights and rejection together; keywords as in `algorithm.rollout_correction`.

    normalize: divide by the mean weight of the entries, chunk steps or trajectories (each counts once), after clamping
    and before rejection. total: sums over all parts of an update, of which the entries are one.
    """
    kept, factor, clipped = entries.mask, entries.mask.to(entries.proximal.dtype), torch.zeros_like(entries.mask)
    if weight != "none":
        raw = importance_weights(entries, level=weight, by=weight_by)
        bounded = raw
        if weight_min is not None or weight_max is not None:
            bounded = raw.clamp(weight_min, weight_max)
        clipped = (bounded != raw) & entries.mask
        if normalize:
            bounded = bounded / _mean_of_units(bounded, entries, weight, total).clamp_min(1e-8)
        factor = torch.where(entries.mask, bounded, 0.0)
    if reject != "none":
        kept = within_bounds(
            entries, metric=reject, level=reject_level, by=reject_by, below=reject_below, above=reject_above
        )
        factor = torch.where(kept, factor, 0.0)
    return Correction(factor, kept, clipped)


def importance_weights(entries: Entries, *, level: Level, by: Literal["product", "geometric_mean"]) -> Tensor:
    """π_prox/π_b over an entry, a chunk step or a trajectory, repeated at all its entries.

    Example: log-ratios (0.4, 0.2) of one trajectory → product exp(0.6) for both, geometric_mean exp(0.3).
    """
    how: Reduction = "sum" if by == "product" else "mean"
    log_weight = reduce_to_level(entries.proximal - entries.behavior, entries.mask, entries.trajectory, level, how)
    return log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def within_bounds(
    entries: Entries,
    *,
    metric: Literal["ratio", "k2", "k3"],
    level: Level,
    by: Reduction,
    below: float | None,
    above: float | None,
) -> Tensor:
    """Which entries have a divergence within [below, above] (bool).

    ratio: π_prox/π_b, combined over the level's entries in its logarithm; k2, k3: estimates of KL(π_b ‖ π_prox).
    Example: ratios (4, 1) of one trajectory, level trajectory, by mean, above 2 → exp(½·log 4) = 2: both are kept.
    """
    if metric == "ratio":
        x = entries.proximal - entries.behavior
    else:
        x = (k2 if metric == "k2" else k3)(entries.behavior, entries.proximal)
    x = reduce_to_level(x, entries.mask, entries.trajectory, level, by)
    if metric == "ratio":
        x = x.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    kept = entries.mask.clone()
    if below is not None:
        kept &= x >= below
    if above is not None:
        kept &= x <= above
    return kept


def reduce_to_level(x: Tensor, mask: Tensor, trajectory: Tensor, level: Level, by: Reduction) -> Tensor:
    """x reduced over the valid entries of each chunk step or trajectory, and repeated at all its entries."""
    if level == "token":
        return x
    per_row = _reduce_rows(torch.where(mask, x, 0.0 if by != "max" else -torch.inf), by)
    count = mask.flatten(1).sum(1) if mask.dim() > 1 else mask.long()
    owner = trajectory if level == "trajectory" else torch.arange(len(x), device=x.device)
    groups = int(owner.max()) + 1
    if by == "max":
        total = per_row.new_full((groups,), -torch.inf).scatter_reduce_(0, owner, per_row, "amax")
        total = torch.where(total.isinf(), 0.0, total)
    else:
        total = per_row.new_zeros(groups).index_add_(0, owner, per_row)
    if by == "mean":
        total = total / count.new_zeros(groups).index_add_(0, owner, count).clamp(min=1)
    return total[owner].reshape(-1, *(1,) * (x.dim() - 1)).expand_as(x)


def _mean_of_units(weight: Tensor, entries: Entries, level: Level, total: Total) -> Tensor:
    """The mean of weights over the level's units that have a valid entry; NaN where none has."""
    mask = entries.mask.to(weight.dtype)
    share = (
        mask
        if level == "token"
        else mask / reduce_to_level(mask, entries.mask, entries.trajectory, level, "sum").clamp(min=1)
    )
    sums = total(torch.stack([(weight * share).sum(), share.sum()]))
    return sums[0] / sums[1]


def _reduce_rows(x: Tensor, by: Reduction) -> Tensor:
    """x [N,...] → [N]: the largest entry of each row, or the sum."""
    rows = x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)
    return rows.amax(1) if by == "max" else rows.sum(1)
