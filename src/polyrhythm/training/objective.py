"""The loss of a micro-batch, and the metrics to log with it.

total = policy_loss + value.coef · value_loss − entropy_coef · entropy + kl.coef · kl, each Σ weight·entry / normaliser.
The normaliser is that of the whole mini-batch, so the losses of its micro-batches add up to the loss of the mini-batch.
Metrics per entry are means over the valid entries of the mini-batch, whatever `algorithm.aggregation` says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.algorithms import aggregation, levels
from polyrhythm.algorithms.advantages import ADVANTAGES, AdvantageInput, Advantages, gae
from polyrhythm.algorithms.divergence import kl_estimate, log_ratio
from polyrhythm.algorithms.entry_selection import SELECTION_RULES, SelectionRule
from polyrhythm.algorithms.losses import POLICY_LOSSES, LossInput, LossOutput, PolicyLoss
from polyrhythm.algorithms.metrics import policy_divergence
from polyrhythm.algorithms.proximal import interpolate
from polyrhythm.algorithms.value import value_loss
from polyrhythm.config.sections.objectives import OwnFunction
from polyrhythm.policies.base import Evaluation, Policy, as_module
from polyrhythm.training.batch import TrainingBatch

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings


def policy_loss(algorithm: AlgorithmSettings) -> PolicyLoss:
    """entries -> LossOutput, with the keywords of `algorithm.loss`; a user's function may return the loss alone."""
    settings = algorithm.loss
    if not isinstance(settings, OwnFunction):
        return _bind(POLICY_LOSSES[settings.type], settings.model_dump())
    own = _bind(settings.function(), settings.settings)

    def loss(entries: LossInput) -> LossOutput:
        given = own(entries)
        output = LossOutput(given, {}) if isinstance(given, Tensor) else given
        if isinstance(output, LossOutput) and isinstance(output.loss, Tensor):
            got, expected = list(output.loss.shape), list(entries.mask.shape)
            if got != expected:
                raise ValueError(f"{settings.type} returned a loss {got}; return one number per entry, {expected}")
        return output

    return loss


def selection_rule(algorithm: AlgorithmSettings) -> SelectionRule | None:
    """The rule by which the loss selects entries of a mini-batch; None if it selects none."""
    rule = SELECTION_RULES.get(algorithm.loss.type)
    return None if rule is None else _bind(rule, algorithm.loss.model_dump())


def advantage_estimate(algorithm: AlgorithmSettings) -> Callable[[AdvantageInput], Advantages]:
    """samples -> Advantages, with the keywords of `algorithm.advantage`, gamma and gae_lambda."""
    settings, common = algorithm.advantage, algorithm.model_dump(include={"gamma", "gae_lambda"})
    if isinstance(settings, OwnFunction):
        chosen = _bind(settings.function(), common | settings.settings)
    else:
        chosen = _bind(ADVANTAGES[settings.type], common | settings.model_dump())

    def estimate(samples: AdvantageInput) -> Advantages:
        given = chosen(samples)
        return Advantages(given, gae(samples, **common).returns) if isinstance(given, Tensor) else given

    return estimate


def _bind(function: Callable[..., Any], settings: dict[str, Any]) -> Callable[..., Any]:
    """The function with the settings that it accepts as keywords."""
    keywords = inspect.signature(function).parameters.values()
    if any(keyword.kind is keyword.VAR_KEYWORD for keyword in keywords):
        return partial(function, **settings)
    names = {keyword.name for keyword in keywords}
    return partial(function, **{name: value for name, value in settings.items() if name in names})


#: Numbers → each summed over all ranks.
Totals = Callable[[Sequence[float]], Sequence[float]]


class Normalizers(NamedTuple):
    """Divisors of one optimizer step's whole mini-batch: of the entry terms, of the value loss, and of the metrics (the
    number of valid entries)."""

    policy: float
    value: float
    metrics: float


#: Of sums, where the divisors are not known yet (`Objective.scaled`).
UNSCALED = Normalizers(1.0, 1.0, 1.0)


class MicroBatchLoss(NamedTuple):
    """total: scalar with gradient. metrics: name → scalar without gradient, to be summed over the micro-batches."""

    total: Tensor
    metrics: dict[str, Tensor]


class MicroStep(nn.Module):
    """The loss of a micro-batch as one forward pass, for wrappers that sum gradients over ranks."""

    def __init__(self, policy: Policy, objective: Objective) -> None:
        super().__init__()
        self.policy, self._objective = as_module(policy), objective

    def forward(self, batch: TrainingBatch, by: Normalizers, critic_only: bool) -> MicroBatchLoss:
        evaluation = self.policy.evaluate(batch.obs, batch.forward_inputs)  # type: ignore[operator]
        return self._objective.loss(evaluation, batch, by, critic_only=critic_only)


class Objective:
    def __init__(self, algorithm: AlgorithmSettings) -> None:
        self._algorithm = algorithm
        self._level = algorithm.logprob_level
        self._loss = policy_loss(algorithm)
        self._select = selection_rule(algorithm)
        self._has_proximal = algorithm.recomputes or algorithm.interpolates

    def select(
        self, own: TrainingBatch, seed: Sequence[int], whole: Callable[[Tensor], Tensor], places: Tensor | slice
    ) -> Tensor | None:
        """Entries of these chunk steps that the loss's rule selects, None without a rule. seed: of its random draws.

        The rule sees the whole mini-batch. whole: rows of this rank [n,...] → those of all ranks, in the mini-batch's
        order; this rank's are at `places`.
        """
        if self._select is None:
            return None
        mask = own.weight > 0
        parts = own.proximal, own.behavior, own.advantage, mask.to(own.advantage.dtype)
        rows = whole(torch.stack([part.double() for part in parts], dim=1)).unbind(1)
        proximal, behavior, advantage, valid = (x.to(part.dtype) for x, part in zip(rows, parts, strict=True))
        entries = LossInput(proximal, proximal, behavior, advantage, valid > 0)
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence(list(seed)).generate_state(1)[0]))
        return self._select(entries, generator=generator)[places]

    def normalizers(self, batch: TrainingBatch, minibatches: Sequence[Tensor], totals: Totals) -> list[Normalizers]:
        """Normalizers of every mini-batch of an update, computed on the host without waiting for a device.

        minibatches: the chunk steps of `batch` that are this rank's, int64, of each; totals: numbers → their sums over
        ranks, called once.
        """
        of_value = batch.value_mask if batch.value_weight is None else batch.value_weight
        columns = (batch.weight, of_value, batch.weight > 0)
        table = torch.stack([x.reshape(len(batch), -1).sum(1, dtype=torch.float64) for x in columns], dim=1)
        sizes = [len(rows) for rows in minibatches]
        taken = table.index_select(0, torch.cat(list(minibatches))).split(sizes)
        sums = torch.stack([rows.sum(0) for rows in taken]).tolist()
        found = totals([x for row, size in zip(sums, sizes, strict=True) for x in (*row, float(size))])
        how, constant = self._algorithm.aggregation, self._algorithm.aggregation_constant
        of_values = (how, constant) if self._algorithm.value.aggregation == "policy" else ()
        divisors = []
        for i in range(0, len(found), 4):
            (policy, value, valid), steps = found[i : i + 3], int(found[i + 3])
            by_value = aggregation.normalizer(value, steps, *of_values)
            divisors.append(Normalizers(aggregation.normalizer(policy, steps, how, constant), by_value, valid or 1.0))
        return divisors

    def loss(
        self, evaluation: Evaluation, batch: TrainingBatch, by: Normalizers, *, critic_only: bool
    ) -> MicroBatchLoss:
        """The loss of one micro-batch.

        critic_only excludes all terms but the value loss from the graph, and a coefficient of 0 its term: a zero
        gradient would still let weight decay and momentum move the parameters. Terms excluded by critic_only are still
        reported.
        """
        algorithm = self._algorithm
        logprob = levels.reduce(evaluation.logprob, batch.valid, self._level)
        proximal = batch.proximal if batch.alpha is None else interpolate(logprob, batch.behavior, batch.alpha)
        entries = LossInput(
            logprob, proximal, batch.behavior, batch.advantage, mask=batch.weight > 0, selected=batch.selected
        )
        weight = batch.weight / by.policy
        output = self._policy_loss(entries, batch)
        policy = _dot(weight, output.loss)
        entropy = levels.reduce(evaluation.entropy, batch.valid, self._level)
        metrics = output.metrics | policy_divergence(entries, has_proximal=self._has_proximal)
        metrics["entropy_loss"] = entropy.detach()
        if batch.alpha is not None:
            metrics["interpolation_error"] = (proximal - logprob.detach()).abs()
        terms = [] if critic_only else [policy]
        if algorithm.entropy_coef and not critic_only:
            terms.append(-algorithm.entropy_coef * _dot(weight, entropy))
        if batch.reference is not None:
            kl = kl_estimate(logprob, batch.reference, algorithm.kl.estimator, algorithm.kl.cap)
            metrics["reference_kl"] = kl.detach()
            if algorithm.kl.place == "loss" and not critic_only:
                terms.append(algorithm.kl.coef * _dot(weight, kl))
        mean = entries.mask / by.metrics  # one product for all metrics
        table = torch.stack(list(metrics.values())).flatten(1).to(mean.dtype)
        means = dict(zip(metrics, (table @ mean.flatten()).unbind(), strict=True))
        logged = {f"train/actor/{name}": x for name, x in means.items()}
        logged["train/actor/policy_loss"] = policy.detach()
        if algorithm.value.coef:
            value = self._value_loss(evaluation.value, batch, by)
            terms.append(algorithm.value.coef * value)
            logged["train/critic/value_loss"] = value.detach()
        return MicroBatchLoss(sum(terms[1:], terms[0]), logged)

    def scaled(self, metrics: Mapping[str, Tensor], by: Normalizers, factor: float) -> dict[str, Tensor]:
        """The metrics of a mini-batch from those of its sums (`UNSCALED`); factor: on the weights of its entries."""
        divisors = {"train/actor/policy_loss": by.policy / factor, "train/critic/value_loss": by.value / factor}
        return {name: x / divisors.get(name, by.metrics) for name, x in metrics.items()}

    def _policy_loss(self, entries: LossInput, batch: TrainingBatch) -> LossOutput:
        """The policy loss per entry, times the importance weights of `rollout_correction` or `mismatch_cap`."""
        output = self._loss(entries)
        if batch.correction is not None:
            return LossOutput(batch.correction * output.loss, output.metrics)
        cap = self._algorithm.mismatch_cap
        if cap is None:
            return output
        weight = log_ratio(entries.proximal, entries.behavior).exp().clamp(max=cap)
        return LossOutput(weight * output.loss, output.metrics | {"mismatch_weight": weight})

    def _value_loss(self, value: Tensor, batch: TrainingBatch, by: Normalizers) -> Tensor:
        clip, huber = self._algorithm.value.clip, self._algorithm.value.huber
        loss = value_loss(value, batch.old_value, batch.returns, batch.value_mask, clip=clip, huber=huber)
        if batch.value_weight is not None:
            return _dot(batch.value_weight, loss) / by.value
        return loss.sum() / by.value


def _dot(weight: Tensor, x: Tensor) -> Tensor:
    return torch.dot(weight.flatten().to(x.dtype), x.flatten())
