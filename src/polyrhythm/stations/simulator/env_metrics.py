"""Aggregates the environment's own metrics over env steps to one number per episode.

The simulator keeps them, so an episode that is cut into segments counts as one episode and only the result is sent.
An environment that declares no metrics has no `EpisodeMetrics` and no overhead.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from polyrhythm.envs.base import StepResult
from polyrhythm.specs import Aggregate
from polyrhythm.stations.simulator.chunk import Step

log = logging.getLogger(__name__)


class EpisodeMetrics:
    """Episode metrics of an env batch of `rows` rows. Steps whose number is NaN are skipped."""

    def __init__(self, metrics: Mapping[str, Aggregate], rows: int) -> None:
        self._aggregates = dict(metrics)
        self._values = {name: np.zeros(rows) for name in metrics}
        self._counts = {name: np.zeros(rows, np.int64) for name in metrics}
        self._warned: set[str] = set()

    def wrap(self, step: Step) -> Step:
        """The step function with its metrics added up."""

        def watched(rows: NDArray[np.intp], actions: NDArray[np.generic]) -> StepResult:
            outcome = step(rows, actions)
            self._add(rows, outcome.metrics)
            return outcome

        return watched

    def begin(self, rows: NDArray[np.intp]) -> None:
        """Reset the metrics of these rows, in which an episode begins."""
        for name, values in self._values.items():
            values[rows] = -np.inf if self._aggregates[name] == "max" else 0.0
            self._counts[name][rows] = 0

    def summarize(self, row: int) -> tuple[tuple[str, float], ...]:
        """(name, number) of the episode that ended in this row, finite ones only."""
        numbers = {name: self._aggregate(name, row) for name in self._aggregates}
        for name, number in numbers.items():
            if not math.isfinite(number) and name not in self._warned:
                self._warned.add(name)
                log.warning("env/metrics/%s: an episode gave %s, excluded from the mean (logged once)", name, number)
        return tuple((name, number) for name, number in numbers.items() if math.isfinite(number))

    def _aggregate(self, name: str, row: int) -> float:
        value, count = float(self._values[name][row]), int(self._counts[name][row])
        if not count:
            return math.nan
        return value / count if self._aggregates[name] == "mean" else value

    def _add(self, rows: NDArray[np.intp], metrics: Mapping[str, NDArray[np.floating]]) -> None:
        for name, aggregate in self._aggregates.items():
            given, total = np.asarray(metrics[name], np.float64), self._values[name]
            there = ~np.isnan(given)
            chosen, numbers = rows[there], given[there]
            self._counts[name][chosen] += 1
            if aggregate == "last":
                total[chosen] = numbers
            elif aggregate == "max":
                total[chosen] = np.maximum(total[chosen], numbers)
            else:
                with np.errstate(over="ignore", invalid="ignore"):  # `summarize` drops a result that is not finite
                    total[chosen] += numbers
