"""Costs of a station's works by their amounts, from a profile: of single works, of an update, and their spread."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.planning.profile import Kind, Profile, StationProfile, Work, WorkName
from polyrhythm.plugins.virtual.clustersim.costs import FREE, Cost
from polyrhythm.specs.distributions import Constant, Lognormal

#: Standard normal quantile of the 90th percentile.
_Z90 = 1.2816
#: Largest standard deviation of a time's logarithm, so that a few outliers among few measurements do not set it.
_WIDEST = 1.0
#: By which a quotient may be off.
_ROUNDING = 1e-9
#: Least share of a device that a pass takes.
_LEAST_SHARE = 0.05
#: Works without which a station is not simulated.
NEEDED: Mapping[Kind, tuple[WorkName, ...]] = {
    "simulator": ("step",),
    "generator": ("pass",),
    "trainer": ("micro_batch", "optimizer_step"),
    "scorer": ("score",),
}


@dataclass(frozen=True, slots=True)
class MeasuredCost(Cost):
    """A cost by measured points (units, mean seconds), linear between them, times a draw of mean 1.

    base, per_unit: the line through the points, for the parts of the simulation that need one.
    """

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    sigma: float = 0.0

    @classmethod
    def of(cls, points: Sequence[tuple[float, float]], sigma: float = 0.0) -> MeasuredCost:
        """points: in ascending order of units."""
        (low, first), (high, last) = points[0], points[-1]
        slope = max(0.0, (last - first) / (high - low)) if high > low else 0.0
        base = max(0.0, fmean(seconds - slope * units for units, seconds in points))
        return cls(Constant(base), slope, tuple(points), sigma)

    def mean(self, units: int = 1) -> float:
        points = self.points
        if len(points) == 1:
            return points[0][1]
        index = min(max(1, bisect_left(points, (units,))), len(points) - 1)
        (low, first), (high, last) = points[index - 1], points[index]
        return max(0.0, first + (last - first) * (units - low) / (high - low))

    def draw(self, rng: random.Random, units: int = 1) -> float:
        mean = self.mean(units)
        return mean * Lognormal(1.0, self.sigma).sample(rng) if self.sigma and mean else mean


def refuse_incomplete(profile: Profile, config: RunConfig) -> None:
    """ConfigError: the profile lacks a station of the recipe, or what is needed of one."""
    for kind in ("simulator", "generator", "trainer", *(("scorer",) if config.scoring is not None else ())):
        station_of(profile, kind, NEEDED[kind])


def station_of(profile: Profile, kind: Kind, needed: Sequence[WorkName]) -> StationProfile:
    """ConfigError: the profile lacks this station, or works of it."""
    station = profile.stations.get(kind)
    missing = [name for name in needed if station is None or name not in station.works]
    if station is None or missing:
        raise ConfigError(
            f"profile: it lacks {', '.join(missing)} of the {kind}, which the time was too short for or the recipe did "
            "not have; measure again with more --minutes"
        )
    return station


def update_seconds(
    profile: Profile, training: TrainingSettings, chunk_steps: float, *, ranks: int = 1, epochs: int | None = None
) -> float:
    """Seconds of an update of this many chunk steps of a rank: targets, then every mini-batch of every epoch in its
    micro-batches, each mini-batch with an optimizer step. ranks: share each mini-batch.

    epochs: instead of the recipe's. Updates that `training.max_kl` ends are shorter.
    """
    works = station_of(profile, "trainer", ("micro_batch", "optimizer_step")).works
    mini, parts = mini_batch(training, chunk_steps, ranks)
    each = parts * _seconds(works["micro_batch"], mini / parts) + works["optimizer_step"].seconds(1)
    prepare = _seconds(works["prepare"], chunk_steps) if "prepare" in works else 0.0
    return prepare + (training.epochs if epochs is None else epochs) * max(1.0, chunk_steps / mini) * each


def mini_batch(training: TrainingSettings, chunk_steps: float, ranks: int = 1) -> tuple[float, int]:
    """A rank's chunk steps of an optimizer step, and the number of its micro-batches. chunk_steps: of a rank's
    update. A share of `require_batches` is cut into the fewest equal mini-batches, as the learner does."""
    mini = chunk_steps / training.require_batches
    if training.minibatch_steps:
        mini /= max(1, math.ceil(mini * ranks / training.minibatch_steps - _ROUNDING))
    mini = max(1.0, mini)
    return mini, max(1, math.ceil(mini / (training.micro_batch_steps or mini) - _ROUNDING))


def sample_steps(profile: Profile, config: RunConfig) -> float:
    """Mean chunk steps of a sample: of an episode, or of its segments."""
    mean, segment = profile.episodes.mean, config.rollout.segment_steps
    return mean if not segment else mean / math.ceil(mean / segment)


def share_beside(station: StationProfile) -> float:
    """Share of a device that the station's work takes: half of the factor by which it and another slow each other down,
    since two that take a share of a half do not. Not measured: all, as by time slices."""
    if not station.beside:
        return 1.0
    return min(1.0, max(_LEAST_SHARE, fmean(station.beside.values()) / 2))


def work_cost(
    station: StationProfile,
    name: WorkName,
    added_s: float = 0.0,
    buckets: Sequence[int] = (),
    units: int | None = None,
) -> Cost:
    """A work's cost by its amount; free if it was not measured. units: of this amount alone; buckets: amounts that
    others are padded to; added_s: to each."""
    work = station.works.get(name)
    if work is None:
        return FREE
    sigma = spread(work)
    if units is not None:
        return MeasuredCost.of([(1, work.seconds(units))], sigma)
    if buckets:  # a step at each bucket
        ends = sorted({*buckets, *(bucket + 1 for bucket in buckets[:-1])})
        seconds: Callable[[int], float] = lambda n: work.seconds(buckets[bisect_left(buckets, n)])  # noqa: E731
        return MeasuredCost.of([(n, seconds(n) + added_s) for n in ends], sigma)
    amounts = [timing.amount for timing in work.timings]
    beyond = [2 * amounts[-1]] if amounts[-1] else []
    return MeasuredCost.of([(n, work.seconds(n) + added_s) for n in (*amounts, *beyond)], sigma)


def _seconds(work: Work, amount: float) -> float:
    """`Work.seconds` of an amount that is a mean."""
    low, share = math.floor(amount), amount % 1
    return (1 - share) * work.seconds(low) + share * work.seconds(low + 1) if share else work.seconds(low)


def mean_s(station: StationProfile, name: WorkName) -> float:
    return station.works[name].seconds(0) if name in station.works else 0.0


def spread(work: Work) -> float:
    """Standard deviation of the logarithm of a time, from its median and 90th percentile, by the measurements."""
    pairs = [(timing.count, timing) for timing in work.timings if timing.p90_s > timing.median_s > 0]
    total = sum(count for count, _ in pairs)
    return min(_WIDEST, sum(n * math.log(t.p90_s / t.median_s) for n, t in pairs) / _Z90 / total) if total else 0.0
