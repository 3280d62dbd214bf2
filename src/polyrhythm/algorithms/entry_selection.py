"""Rules that select entries of a mini-batch for special treatment by a loss.

A rule sees an optimizer step's whole mini-batch before it is cut into micro-batches, with π_prox in place of π_θ, so
that the choice does not depend on the micro-batch size. Deviation: the papers use π_θ of the same step, which equals
π_prox at an update's first optimizer step; and clip_cov there excludes entries that PPO already clips.

Sources: clip_cov and kl_cov: Cui et al. 2025, "The Entropy Mechanism of RL for Reasoning Language Models"; m2po: Zheng
et al. 2025, "Prosperity before Collapse", in the form of AReaL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from polyrhythm.algorithms.losses import LossInput

#: (entries, *, settings by keyword, generator) -> bool, shaped like the entries. entries.logprob is logπ_prox.
SelectionRule = Callable[..., Tensor]


def covariance_band(
    entries: LossInput, *, fraction: float, cov_low: float, cov_high: float, generator: torch.Generator
) -> Tensor:
    """max(1, ⌊fraction·n⌋) of the n valid entries, drawn from those with a covariance between cov_low and cov_high.

    Covariance of an entry: (A − mean A)·(logπ − mean logπ), means over the valid entries.
    """
    covariance = _covariance(entries)
    candidates = ((covariance > cov_low) & (covariance < cov_high) & entries.mask).flatten().nonzero().squeeze(1)
    order = torch.randperm(len(candidates), generator=generator).to(candidates.device)
    return _at(candidates[order[: _count(entries, fraction)]], entries)


def top_covariance(entries: LossInput, *, fraction: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """The max(1, ⌊fraction·n⌋) valid entries with the largest covariance (see `covariance_band`)."""
    covariance = torch.where(entries.mask, _covariance(entries), -torch.inf).flatten()
    largest = covariance.topk(min(_count(entries, fraction), int(entries.mask.sum()))).indices
    return _at(largest, entries)


def second_moment_excess(entries: LossInput, *, threshold: float, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    """The fewest entries with the largest (logπ_prox − logπ_b)² without which the mean of the others is below
    threshold.

    One valid entry is left in any case.
    Example: squares (9, 1, 0.01, 0.02), threshold 0.04 → the first two.
    """
    squares, order = (entries.logprob - entries.behavior)[entries.mask].square().sort()
    if not len(squares):
        return torch.zeros_like(entries.mask)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = max(int((means < threshold).sum()), 1)  # the means of an ascending sequence ascend
    places = entries.mask.flatten().nonzero().squeeze(1)
    return _at(places[order[kept:]], entries)


SELECTION_RULES: Mapping[str, SelectionRule] = MappingProxyType(
    {"clip_cov": covariance_band, "kl_cov": top_covariance, "m2po": second_moment_excess}
)


def _covariance(entries: LossInput) -> Tensor:
    valid = entries.mask
    if not valid.any():
        return torch.zeros_like(entries.advantage)
    advantage, logprob = entries.advantage.double(), entries.logprob.double()
    return (advantage - advantage[valid].mean()) * (logprob - logprob[valid].mean())


def _count(entries: LossInput, fraction: float) -> int:
    return max(int(fraction * int(entries.mask.sum())), 1)


def _at(places: Tensor, entries: LossInput) -> Tensor:
    """True at these places of the flattened entries."""
    chosen = torch.zeros(entries.mask.numel(), dtype=torch.bool, device=entries.mask.device)
    chosen[places] = True
    return chosen.reshape(entries.mask.shape)
