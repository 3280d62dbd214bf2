"""One micro-batch's share of the loss and of the figures to log.

total = policy_loss + value.coef · value_loss − entropy_coef · entropy, each Σ weight·entry / normaliser with the
normaliser of the whole mini-batch: the shares of its micro-batches simply add up. The value loss is a mean over
valid entries at reward level, whatever the aggregation of the policy loss.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms import aggregation, levels
from polyrhythm.algorithms.figures import drift
from polyrhythm.algorithms.losses import POLICY_LOSSES, Entries, PolicyLoss, value_loss
from polyrhythm.policies.base import Evaluation
from polyrhythm.training.batch import Decisions

if TYPE_CHECKING:
    from polyrhythm.config.learning import AlgorithmSettings, LossSettings


class Normalizers(NamedTuple):
    """Numbers to divide by, of one optimizer step's whole mini-batch."""

    policy: float
    value: float


class Share(NamedTuple):
    """total: scalar with gradient. figures: name → scalar without, to be summed over the mini-batch's parts."""

    total: Tensor
    figures: dict[str, Tensor]


def policy_loss(settings: LossSettings) -> PolicyLoss:
    """The loss that `settings.type` names, with its keywords taken from the fields of the same names."""
    loss = POLICY_LOSSES[settings.type]
    keywords = [p.name for p in inspect.signature(loss).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return partial(loss, **{name: getattr(settings, name) for name in keywords})


class Objective:
    """The loss of an update, as `algorithm` describes it."""

    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self._level = algorithm.logprob_level
        self._value = algorithm.value
        self._entropy_coef = algorithm.entropy_coef
        self._loss = policy_loss(algorithm.loss)

    def normalizers(self, minibatch: Decisions) -> Normalizers:
        """Of the whole mini-batch, on the host (reading them waits for no device), before it is cut."""
        weight, value_mask = minibatch.weight, minibatch.value_mask
        return Normalizers(float(aggregation.normalizer(weight)), float(aggregation.normalizer(value_mask)))

    def share(self, evaluation: Evaluation, part: Decisions, by: Normalizers, *, critic_only: bool) -> Share:
        """critic_only leaves policy loss and entropy out of the graph (no zero gradients: weight decay and momentum
        must not move parameters that only they would reach); they are still reported."""
        entries = Entries(
            logprob=levels.reduce(evaluation.logprob, part.valid, self._level),
            proximal=part.proximal,
            behavior=part.behavior,
            advantage=part.advantage,
            mask=part.weight > 0,
        )
        weight = part.weight / by.policy
        terms = self._loss(entries)
        policy = (weight * terms.loss).sum()
        entropy = (weight * levels.reduce(evaluation.entropy, part.valid, self._level)).sum()
        value = self._value_share(evaluation.value, part, by)

        total = self._value.coef * value
        if not critic_only:
            total = total + policy
            if self._entropy_coef:
                total = total - self._entropy_coef * entropy
        figures = _weighted(terms.figures | drift(entries), weight)
        figures = {f"train/actor/{name}": x for name, x in figures.items()}
        figures["train/actor/policy_loss"] = policy.detach()
        figures["train/actor/entropy_loss"] = entropy.detach()
        figures["train/critic/value_loss"] = value.detach()
        return Share(total, figures)

    def _value_share(self, value: Tensor, part: Decisions, by: Normalizers) -> Tensor:
        clip, huber = self._value.clip, self._value.huber
        return value_loss(value, part.old_value, part.returns, part.value_mask, clip=clip, huber=huber).sum() / by.value


def _weighted(figures: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Weighted sums of per-entry figures, in one product for all of them."""
    table = torch.stack(list(figures.values())).flatten(1).to(weight.dtype)
    return dict(zip(figures, (table @ weight.flatten()).unbind(), strict=True))
