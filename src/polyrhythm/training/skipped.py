"""Optimizer steps skipped for a gradient that is not finite: counted and logged; too many in a row end the run.

The device skips them itself (`optim.AdamW.step`); this module reads an update once all of its steps are done.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyrhythm.algorithms.sums import Total
from polyrhythm.training.optim import GradientNorm
from polyrhythm.training.steps import Metrics

if TYPE_CHECKING:
    from polyrhythm.config.sections.learning import TrainingSettings

log = logging.getLogger(__name__)

NORM, SKIPPED = "train/actor/grad_norm", "train/actor/skipped_steps"
STOPPED = "train/actor/early_stopped"


class StepTable(NamedTuple):
    """The optimizer steps of one update, on the host. metrics [S, names]; norms: gradient norms of each step, where
    they were computed. A step need not reach every parameter."""

    names: tuple[str, ...]
    metrics: Tensor
    norms: Sequence[GradientNorm]

    @property
    def skipped(self) -> Tensor:
        """Which steps were skipped: [S] bool."""
        return ~self.metrics[:, self.names.index(NORM)].isfinite()

    def means(self) -> Metrics:
        """Means over the steps that were not skipped; over all where all were."""
        skipped = self.skipped
        kept = self.metrics if skipped.all() else self.metrics[~skipped]
        return dict(zip(self.names, kept.mean(0).tolist(), strict=True))

    def first(self, name: str) -> float:
        """A metric of the first step."""
        return float(self.metrics[0, self.names.index(name)])

    def first_skipped(self) -> tuple[dict[str, bool], dict[int, bool]]:
        """Of the first skipped step: which metrics are finite, and the gradient of which parameters that it reached."""
        first = int(self.skipped.nonzero()[0])
        metrics = dict(zip(self.names, self.metrics[first].isfinite().tolist(), strict=True))
        norms = self.norms[first]
        return metrics, dict(zip(norms.places, norms.each.isfinite().tolist(), strict=True))


class StepLog:
    """The optimizer steps of an update as they are done. last: the metrics of the newest."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.last: Mapping[str, Tensor] = {}
        self._rows: list[Tensor] = []
        self._norms: list[GradientNorm] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, metrics: Mapping[str, Tensor], norm: GradientNorm) -> None:
        """Scalars: this rank's part of means over entries, then NORM and STOPPED, which are the same on all ranks."""
        self.names, self.last = tuple(metrics), metrics
        self._rows.append(torch.stack(list(metrics.values())))
        self._norms.append(norm)

    def table(self, total: Total) -> StepTable:
        """All steps; total: sums over ranks. One transfer from the device and one between ranks for the update."""
        table = torch.stack(self._rows).cpu()
        parts = sum(name not in (NORM, STOPPED) for name in self.names)
        return StepTable(self.names, torch.cat((total(table[:, :parts]), table[:, parts:]), dim=1), self._norms)


class SkippedSteps:
    """Counter of skipped steps in a row, across updates."""

    def __init__(self, training: TrainingSettings) -> None:
        self._training = training
        self._in_a_row = 0

    def note(self, update: int, skipped: Sequence[bool], why: str) -> str:
        """Record an update with skipped steps; returns why the run must stop after it, "" if it need not."""
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

    def reset_count(self) -> None:
        """Record an update without skipped steps."""
        self._in_a_row = 0
