"""Optimizer steps whose gradient is not finite: skipped, counted, logged, with the cause.

The device skips them itself (`optim.AdamW.step`); this module reads an update once all of its steps are done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyrhythm.algorithms.sums import Total
from polyrhythm.training.batch import PackedBatch, TrainingBatch
from polyrhythm.training.optim import GradientNorm
from polyrhythm.training.steps import Metrics
from polyrhythm.training.targets import TargetInputs, bootstrap_values

if TYPE_CHECKING:
    from polyrhythm.config.sections.algorithm import AlgorithmSettings
    from polyrhythm.config.sections.learning import TrainingSettings


log = logging.getLogger(__name__)

NORM, SKIPPED = "train/actor/grad_norm", "train/actor/skipped_steps"
STOPPED = "train/actor/early_stopped"


class StepLog:
    """The optimizer steps of an update. last: metrics of the latest. metrics [S, names]: of all, on the host, after
    `fetch`. A step need not reach every parameter."""

    metrics: Tensor

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.last: Mapping[str, Tensor] = {}
        self._rows: list[Tensor] = []
        self._norms: list[GradientNorm] = []  # still on their device

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, metrics: Mapping[str, Tensor], norm: GradientNorm) -> None:
        """Add scalars: this rank's part of means over entries, then NORM and STOPPED, which are equal on all ranks."""
        self.names, self.last = tuple(metrics), metrics
        self._rows.append(torch.stack(list(metrics.values())))
        self._norms.append(norm)

    def fetch(self, total: Total) -> None:
        """Get all steps, by one transfer from the device and one between ranks. total: sums over ranks."""
        table = torch.stack(self._rows).cpu()
        parts = sum(name not in (NORM, STOPPED) for name in self.names)
        self.metrics = torch.cat((total(table[:, :parts]), table[:, parts:]), dim=1)

    @property
    def skipped(self) -> Tensor:
        """Which steps were skipped: [S] bool."""
        return ~self.metrics[:, self.names.index(NORM)].isfinite()

    def means(self) -> Metrics:
        """Means over the steps that were not skipped; over all if all were."""
        skipped = self.skipped
        kept = self.metrics if skipped.all() else self.metrics[~skipped]
        return dict(zip(self.names, kept.mean(0).tolist(), strict=True))

    def first(self, name: str) -> float:
        """Value of a metric at the first step."""
        return float(self.metrics[0, self.names.index(name)])

    def first_skipped(self) -> tuple[dict[str, bool], dict[int, bool]]:
        """Of the first skipped step: whether each metric, and the gradient of each parameter that
        it reached, is finite."""
        first = int(self.skipped.nonzero()[0])
        metrics = dict(zip(self.names, self.metrics[first].isfinite().tolist(), strict=True))
        norms = self._norms[first]
        return metrics, dict(zip(norms.places, norms.each.isfinite().tolist(), strict=True))


class SkippedSteps:
    """Counter of consecutive skipped steps, across updates."""

    def __init__(self, training: TrainingSettings) -> None:
        self._training = training
        self._in_a_row = 0

    def note(self, update: int, skipped: Sequence[bool], why: str) -> str:
        """Record which steps of an update were skipped; returns why the run must stop after it, "" if it need not."""
        if not any(skipped):
            self._in_a_row = 0
            return ""
        training, most = self._training, 0
        for step in skipped:
            self._in_a_row = self._in_a_row + 1 if step else 0
            most = max(most, self._in_a_row)
        count = f"{sum(skipped)} of {len(skipped)} optimizer steps of update {update}"
        log.warning("%s were skipped, the gradient is not finite: %s", count, why)
        kept = "they changed no weights, and a resumed run goes on behind this update"
        if training.on_nonfinite_gradient == "halt":
            return f"training.on_nonfinite_gradient = halt: {count} had a gradient that is not finite: {why} ({kept})"
        if most > training.max_skipped_steps:
            limit = f"training.max_skipped_steps = {training.max_skipped_steps}: {most} optimizer steps in a row"
            return f"{limit}, up to update {update}, had a gradient that is not finite: {why} ({kept})"
        return ""


#: The remedy where weights have grown until a forward or a backward pass overflows.
_SMALLER = "lower training.optimizer.lr, value_lr or grad_clip"


def find_culprit(
    packed: PackedBatch,
    batch: TrainingBatch,
    algorithm: AlgorithmSettings,
    inputs: TargetInputs,
    metrics: Mapping[str, bool],
    parameters: Mapping[str, bool],
) -> str:
    """The source of the non-finite value, and the remedy.

    metrics, parameters: of the optimizer step, whether each metric and the gradient of each parameter is finite. All
    ranks call it together, each checks its own samples, and all get the first cause found, as a rank's non-finite value
    may come from another's samples, such as by a mean over all.
    """
    causes = [*_in_samples(packed), *_in_targets(packed, batch, algorithm, inputs)]
    found = next((i for i, (is_finite, _) in enumerate(causes) if not is_finite), len(causes))
    first = int(min(inputs.ranks.gather(found)))
    if first < len(causes):
        return causes[first][1]
    for name, what in _OF_EVALUATE.items():
        if not metrics.get(name, True):
            return f"policy.evaluate gives a {what} that is not finite; {_SMALLER}"
    if not metrics["train/actor/policy_loss"]:
        return f"algorithm.loss.type = {algorithm.loss.type}: it gives NaN or infinity; {_of_loss(algorithm)}"
    bad = [name for name, finite in parameters.items() if not finite]
    more = f" and {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    where = f"in {bad[0]}{more}" if bad else "in its norm alone"
    return f"the losses are finite, their gradient is not, {where}; {_of_loss(algorithm)}"


#: Metrics that only the policy's `evaluate` can make non-finite, where the targets are finite → what it returned.
_OF_EVALUATE = {
    "train/actor/ratio": "log-prob",
    "train/actor/approx_kl": "log-prob",
    "train/actor/proximal_approx_kl": "log-prob",
    "train/actor/entropy_loss": "entropy",
    "train/actor/reference_kl": "log-prob",
    "train/critic/value_loss": "value",
}


#: Whether a quantity is finite, and what to say if it is not.
_Finding = tuple[bool, str]


def _in_targets(
    packed: PackedBatch, batch: TrainingBatch, algorithm: AlgorithmSettings, inputs: TargetInputs
) -> Iterator[_Finding]:
    """Checks of the inputs of the targets, in order of computation."""
    value = not algorithm.uses_value or _finite(bootstrap_values(packed, algorithm, inputs))
    yield value, f"policy.value gives NaN or infinity for the last observation of a sample; {_SMALLER}"
    yield _finite(batch.proximal), f"policy.evaluate gives log-probs that are not finite; {_SMALLER}"
    yield _finite(batch.old_value), f"policy.evaluate gives values that are not finite; {_SMALLER}"
    advantage, kind = _finite(batch.advantage) and _finite(batch.returns, batch.value_mask), algorithm.advantage.type
    yield advantage, f"algorithm.advantage.type = {kind}: it gives NaN or infinity; correct its formula"


def _in_samples(packed: PackedBatch) -> Iterator[_Finding]:
    """Checks of the samples. Slots refuse non-finite samples; samples from elsewhere may contain them."""
    shown = {f"observation {name}": x for name, x in packed.obs.items()}
    last = {f"the last observation {name}": x for name, x in packed.final_obs.items()}
    for what, values in {"a reward": packed.rewards[packed.valid], **shown, **last}.items():
        yield _finite(values), f"the environment gave {what} of NaN or infinity; correct the environment"
    value = packed.value[packed.valid] if packed.value.shape == packed.valid.shape else packed.value
    for what, values in {"log-prob": packed.logprob[packed.valid], "value": value}.items():
        yield _finite(values), f"policy.act gave a {what} of NaN or infinity; correct the policy"


def _of_loss(algorithm: AlgorithmSettings) -> str:
    own = algorithm.own_functions
    return f"look at {' and '.join(own)} first, or {_SMALLER}" if own else _SMALLER


def _finite(values: Tensor, mask: Tensor | None = None) -> bool:
    return bool((values if mask is None else values[mask]).isfinite().all())
