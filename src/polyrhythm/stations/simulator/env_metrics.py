"""The environment's own metrics: from the numbers of single env steps to one number of each episode.

They are kept where the rows are, so that an episode that is cut into segments is one episode here, and nothing but
the finished numbers travels. An environment that declares none has no `EpisodeMetrics`, and pays nothing.
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
    """Those of an env batch of `rows` rows. A step whose number is NaN does not count; the others do, once each."""

    def __init__(self, metrics: Mapping[str, Aggregate], rows: int) -> None:
        self._aggregates = dict(metrics)
        self._values = {name: np.zeros(rows) for name in metrics}
        self._counts = {name: np.zeros(rows, np.int64) for name in metrics}
        self._warned: set[str] = set()

    def wrap(self, step: Step) -> Step:
        """The same step; what it says of the rows is counted."""

        def watched(rows: NDArray[np.intp], actions: NDArray[np.generic]) -> StepResult:
            outcome = step(rows, actions)
            self._add(rows, outcome.metrics)
            return outcome

        return watched

    def begin(self, rows: NDArray[np.intp]) -> None:
        """An episode begins in each of these rows."""
        for name, values in self._values.items():
            values[rows] = -np.inf if self._aggregates[name] == "max" else 0.0
            self._counts[name][rows] = 0

    def summarize(self, row: int) -> tuple[tuple[str, float], ...]:
        """(name, number) of the episode that ended in this row; without those that are not finite."""
        numbers = {name: self._aggregate(name, row) for name in self._aggregates}
        for name, number in numbers.items():
            if not math.isfinite(number) and name not in self._warned:
                self._warned.add(name)
                log.warning("env/metrics/%s: an episode gave %s, left out of the mean (said once)", name, number)
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
                with np.errstate(over="ignore", invalid="ignore"):  # what becomes of it is not finite, and left out
                    total[chosen] += numbers
