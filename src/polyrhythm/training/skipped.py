"""Optimizer steps that are skipped since their gradient is not finite: counted, told, and too many of them end the run.

A device skips them by itself (`optim.AdamW.step`); what is here looks at an update once all of its steps are done.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from polyrhythm.training.optim import GradientNorm
from polyrhythm.training.steps import Metrics

if TYPE_CHECKING:
    from polyrhythm.config.learning import TrainingSettings

log = logging.getLogger(__name__)

NORM, SKIPPED = "train/actor/grad_norm", "train/actor/skipped_steps"


class StepTable(NamedTuple):
    """The steps of one update, on the host. figures [S, names]; norms: of each step, where they were computed. Not
    every step need reach every parameter."""

    names: tuple[str, ...]
    figures: Tensor
    norms: Sequence[GradientNorm]

    @property
    def skipped(self) -> Tensor:
        """[S] bool."""
        return ~self.figures[:, self.names.index(NORM)].isfinite()

    def means(self) -> Metrics:
        """Over the steps that were not skipped; of all where all were."""
        skipped = self.skipped
        kept = self.figures if skipped.all() else self.figures[~skipped]
        return dict(zip(self.names, kept.mean(0).tolist(), strict=True))

    def first_skipped(self) -> tuple[dict[str, bool], dict[int, bool]]:
        """Of that step: which figures are finite, and whether the gradient is in each parameter that it reached."""
        first = int(self.skipped.nonzero()[0])
        figures = dict(zip(self.names, self.figures[first].isfinite().tolist(), strict=True))
        norms = self.norms[first]
        return figures, dict(zip(norms.places, norms.each.isfinite().tolist(), strict=True))


class SkippedSteps:
    """Counts those in a row, over updates."""

    def __init__(self, training: TrainingSettings) -> None:
        self._training = training
        self._in_a_row = 0

    def note(self, update: int, skipped: Sequence[bool], why: str) -> str:
        """An update in which some steps were skipped; why the run must halt behind it, "" if it need not."""
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
        """An update in which no step was skipped."""
        self._in_a_row = 0


def make_step_table(names: tuple[str, ...], rows: Sequence[Tensor], norms: Sequence[GradientNorm]) -> StepTable:
    """rows: each step's figures [names]; one transfer from the device for the whole update."""
    return StepTable(names, torch.stack(list(rows)).cpu(), norms)
