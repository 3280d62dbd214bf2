"""Learning curves of runs whose samples are whole episodes, and the ratio of two modes over the same seeds.

The x axis is the ticket number. A ticket is the right to one sample, here one episode; tickets are numbered as they are
granted, and a run of V versions of B samples trains on exactly V·B of them. So all modes have the same axis, whatever
finishes first. A curve is the mean return of windows of equally many tickets; the area is the mean return over all.
Worked example: returns 1, 3, 5, 5, 9 in windows of 2 make the curve 2, 5, 9 and the area 23/5 = 4.6.

This includes the whole cost of asynchrony: a ticket is granted α versions early, so even a run that learned as well
from every sample would have its curve shifted by α·B tickets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import ClassVar, NamedTuple

import numpy as np

from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.scheduler import records


class EpisodeOutcome(NamedTuple):
    """A training episode's return (undiscounted), and whether it succeeded."""

    episode_return: float
    success: bool


class EpisodeOutcomes(Observer):
    """An observer: the outcome of each training episode, by ticket. Evaluations do not count."""

    hears: ClassVar[tuple[type, ...]] = (records.SampleFinished,)

    def __init__(self) -> None:
        self.by_ticket: dict[int, EpisodeOutcome] = {}

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.SampleFinished) and event.payload_id:
            assert event.end is not records.SampleEnd.SEGMENT, "a sample is a whole episode"
            self.by_ticket[event.ticket] = EpisodeOutcome(event.episode_return, bool(event.success))

    @property
    def in_order(self) -> list[EpisodeOutcome]:
        """In the order of their tickets."""
        return [self.by_ticket[ticket] for ticket in sorted(self.by_ticket)]


class Goal(Observer):
    """An observer: `reached` once the last `episodes` training episodes that ended have a mean return of `least`.

    at: when that was, on the loop's clock; ended: how many had ended by then.
    """

    hears: ClassVar[tuple[type, ...]] = (records.SampleFinished,)

    def __init__(self, least: float, episodes: int) -> None:
        self.least, self.at, self.ended = least, 0.0, 0
        self._returns: deque[float] = deque(maxlen=episodes)

    @property
    def reached(self) -> bool:
        return self.at > 0.0

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if self.reached or not (isinstance(event, records.SampleFinished) and event.payload_id):
            return
        self.ended += 1
        self._returns.append(event.episode_return)
        if len(self._returns) == self._returns.maxlen and fmean(self._returns) >= self.least:
            self.at = now


def curve(values: Sequence[float], window: int) -> list[float]:
    """Means of consecutive windows of so many values; the last one may have fewer."""
    return [fmean(values[first : first + window]) for first in range(0, len(values), window)]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Point by point, of curves of equally many."""
    return [fmean(values) for values in zip(*curves, strict=True)]


def placed(points: Sequence[float], samples: int, window: int) -> list[tuple[float, float]]:
    """Each point of a curve over `samples` values in the middle of its window."""
    return [(min((place + 0.5) * window, float(samples)), value) for place, value in enumerate(points)]


def ratio_of_means(
    own: Sequence[float], others: Sequence[float], *, resamples: int = 10_000, seed: int = 0
) -> dict[str, float]:
    """mean(own) / mean(others), both by seed in the same order, with a bootstrap 95% interval: ratio, low, high.

    The bootstrap is paired and of percentiles: each resample draws as many seeds as there are, with replacement, and
    takes both values of each. Others are to be positive, else a ratio says nothing.
    """
    assert len(own) == len(others)
    assert min(others) > 0
    pairs = np.array([own, others], np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(own), (resamples, len(own)))
    means = pairs[:, drawn].mean(axis=-1)
    low, high = np.quantile(means[0] / means[1], (0.025, 0.975))
    return {"ratio": float(pairs[0].mean() / pairs[1].mean()), "low": float(low), "high": float(high)}
