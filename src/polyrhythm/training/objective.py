"""One micro-batch's share of the loss and of the figures to log.

total = policy_loss + value.coef · value_loss − entropy_coef · entropy + kl.coef · kl, each Σ weight·entry / normaliser
with the normaliser of the whole mini-batch: the shares of its micro-batches simply add up. The value loss is a mean
over valid entries at reward level, whatever the aggregation of the policy loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms import aggregation, levels
from polyrhythm.algorithms.divergence import KL_ESTIMATORS, log_ratio
from polyrhythm.algorithms.figures import drift
from polyrhythm.algorithms.losses import Entries, Terms
from polyrhythm.algorithms.proximal import interpolate
from polyrhythm.algorithms.value import value_loss
from polyrhythm.policies.base import Evaluation
from polyrhythm.training.batch import Decisions
from polyrhythm.training.choose import policy_loss

if TYPE_CHECKING:
    from polyrhythm.config.algorithm import AlgorithmSettings


class Normalizers(NamedTuple):
    """Numbers to divide by, of one optimizer step's whole mini-batch: what is over entries in the loss, what is at
    reward level, and figures (the same as policy but for sum_over_constant)."""

    policy: float
    value: float
    figures: float


class Share(NamedTuple):
    """total: scalar with gradient. figures: name → scalar without, to be summed over the mini-batch's parts."""

    total: Tensor
    figures: dict[str, Tensor]


class Objective:
    """The loss of an update, as `algorithm` describes it."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self._algorithm = algorithm
        self._level = algorithm.logprob_level
        self._loss = policy_loss(algorithm)
        self._own_proximal = algorithm.recomputes or algorithm.interpolates

    def normalizers(self, minibatch: Decisions) -> Normalizers:
        """Of the whole mini-batch, on the host (reading them waits for no device), before it is cut."""
        entries = float(aggregation.normalizer(minibatch.weight))
        value = float(aggregation.normalizer(minibatch.value_mask))
        return Normalizers(self._algorithm.aggregation_constant or entries, value, entries)

    def share(self, evaluation: Evaluation, part: Decisions, by: Normalizers, *, critic_only: bool) -> Share:
        """critic_only leaves all but the value loss out of the graph, and a coefficient of 0 its term (no zero
        gradients: weight decay and momentum must not move parameters that only they would reach); what critic_only
        leaves out is still reported."""
        algorithm = self._algorithm
        logprob = levels.reduce(evaluation.logprob, part.valid, self._level)
        proximal = part.proximal if part.alpha is None else interpolate(logprob, part.behavior, part.alpha)
        entries = Entries(logprob, proximal, part.behavior, part.advantage, part.weight > 0)
        weight, mean = part.weight / by.policy, part.weight / by.figures
        terms = self._terms(entries)
        policy = _dot(weight, terms.loss)
        entropy = levels.reduce(evaluation.entropy, part.valid, self._level)
        figures = terms.figures | drift(entries, own_proximal=self._own_proximal)
        figures["entropy_loss"] = entropy.detach()
        if part.alpha is not None:
            figures["interpolation_error"] = (proximal - logprob.detach()).abs()
        losses = [] if critic_only else [policy]
        if algorithm.entropy_coef and not critic_only:
            losses.append(-algorithm.entropy_coef * _dot(weight, entropy))
        if part.reference is not None:
            distance = KL_ESTIMATORS[algorithm.kl.estimator](logprob, part.reference)
            figures["reference_kl"] = distance.detach()
            if algorithm.kl.place == "loss" and not critic_only:
                losses.append(algorithm.kl.coef * _dot(weight, distance))
        logged = {f"train/actor/{name}": x for name, x in _weighted(figures, mean).items()}
        logged["train/actor/policy_loss"] = policy.detach()
        if algorithm.value.coef:
            value = self._value_share(evaluation.value, part, by)
            losses.append(algorithm.value.coef * value)
            logged["train/critic/value_loss"] = value.detach()
        return Share(sum(losses[1:], losses[0]), logged)

    def _terms(self, entries: Entries) -> Terms:
        """The policy loss, weighed where the generator's engine and the trainer's do not agree."""
        terms = self._loss(entries)
        cap = self._algorithm.mismatch_cap
        if cap is None:
            return terms
        weight = log_ratio(entries.proximal, entries.behavior).exp().clamp(max=cap)
        return Terms(weight * terms.loss, terms.figures | {"mismatch_weight": weight})

    def _value_share(self, value: Tensor, part: Decisions, by: Normalizers) -> Tensor:
        clip, huber = self._algorithm.value.clip, self._algorithm.value.huber
        return value_loss(value, part.old_value, part.returns, part.value_mask, clip=clip, huber=huber).sum() / by.value


def _dot(weight: Tensor, x: Tensor) -> Tensor:
    """Σ weight·x over all entries."""
    return torch.dot(weight.flatten().to(x.dtype), x.flatten())


def _weighted(figures: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Weighted sums of per-entry figures, in one product for all of them."""
    table = torch.stack(list(figures.values())).flatten(1).to(weight.dtype)
    return dict(zip(figures, (table @ weight.flatten()).unbind(), strict=True))
