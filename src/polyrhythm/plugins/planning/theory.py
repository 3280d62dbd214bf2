"""Bounds on the time of one version, synchronous and asynchronous: ROLL Flash, section 3.1 (propositions 1 and 2); what
they say for one case; and the stage times of a finished run, in the same terms. Pure functions.

K equal workers generate the N samples of a version and train on them. Synchronous: all K generate, then all K train.
Asynchronous: a share β of them trains while the others generate, at most α versions ahead. All times in seconds.
Assumptions: a worker generates one sample at a time and starts the next at once; training scales perfectly over
workers; weight transfer takes no time. The paper's formulas are upper bounds; a ratio of two bounds is not a bound.

The two floors, and `paced_bound` for our admission rule, are our additions:
docs/design/measuring-and-planning.md has the proof and states where each formula fails.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

from polyrhythm.specs.distributions import Distribution


@dataclass(frozen=True, slots=True)
class Workload:
    """One version of training, in the paper's terms.

    samples: N; workers: K; rollout_s: μ_gen, mean time of one sample on one worker; longest_s: L_gen, upper limit of a
    sample's time; train_s: μ_train, one pass over one sample on one worker; passes: E, training passes over a sample.
    """

    samples: int
    workers: int
    rollout_s: float
    longest_s: float
    train_s: float
    passes: int = 1

    def __post_init__(self) -> None:
        checks = (
            ("samples", self.samples, self.samples >= 1, "make it at least 1"),
            ("workers", self.workers, self.workers >= 1, "make it at least 1"),
            ("rollout", self.rollout_s, 0 < self.rollout_s < math.inf, "make it more than 0 seconds"),
            ("longest", self.longest_s, self.longest_s < math.inf, "make it finite"),
            (
                "longest",
                self.longest_s,
                self.longest_s >= self.rollout_s * (1 - 1e-9),
                f"make it at least the mean, {self.rollout_s:g}",
            ),
            ("train", self.train_s, 0 < self.train_s < math.inf, "make it more than 0 seconds"),
            ("passes", self.passes, self.passes >= 1, "make it at least 1"),
        )
        for name, value, good, remedy in checks:
            if not good:
                raise ValueError(f"{name} is {value:g}; {remedy}")

    @property
    def generating_s(self) -> float:
        """N·μ_gen / K: generation on all workers, without its tail."""
        return self.samples * self.rollout_s / self.workers

    @property
    def training_s(self) -> float:
        """E·N·μ_train / K: training on all workers."""
        return self.passes * self.samples * self.train_s / self.workers


def completion_bound(samples: float, workers: float, rollout_s: float, longest_s: float) -> float:
    """Proposition 1, (4): Q samples on K workers that never idle while a sample waits take at most Q/K·μ + L.

    Holds for these samples' mean (in expectation for a distribution's mean), and with L·(1 - 1/K) for L.
    Example: 10 samples of mean 2 s and at most 5 s on 4 workers: 10 s.
    """
    return samples / workers * rollout_s + longest_s


def synchronous_bound(work: Workload) -> float:
    """Proposition 2, (8): N/K·(μ_gen + E·μ_train) + L_gen. Generation, its tail, then training, on all workers."""
    return work.generating_s + work.training_s + work.longest_s


def synchronous_floor(work: Workload, reached_s: float = 0.0) -> float:
    """Lower bound on a synchronous version: max(N/K·μ_gen, longest) + N/K·E·μ_train.

    reached_s: expected time of a version's longest sample, 0 if unknown. (8) has the sum of the two terms instead of
    their maximum, so it is up to twice as large; (8) over a T_async therefore overestimates the speed-up.
    """
    return max(work.generating_s, reached_s) + work.training_s


def asynchronous_bound(work: Workload, max_lag: float, share: float) -> float:
    """Proposition 2, (9): the slower of generation on (1-β)K workers and training on βK, neither waiting for the other.

    max(N·μ_gen / ((1-β)K) + L_gen / ((α+1)(1-β)),  E·N·μ_train / (βK)). Proposition 1 has the tail without its 1/(1-β);
    the paper's form is looser and balances in closed form. It ignores that rollout waits for the trainer when it is
    α versions ahead: below α = 1 little or nothing overlaps and the bound does not hold (see `paced_bound`).
    """
    _check(max_lag, share)
    tail = work.longest_s / ((max_lag + 1) * (1 - share))
    return max(work.generating_s / (1 - share) + tail, work.training_s / share)


def asynchronous_floor(work: Workload, share: float) -> float:
    """Lower bound on an asynchronous version: max(N·μ_gen / ((1-β)K), E·N·μ_train / (βK)), (9) without the tail.

    It is least where both terms are equal, β = E·μ_train / (μ_gen + E·μ_train): (10) with α → ∞.
    """
    _check(share=share)
    return max(work.generating_s / (1 - share), work.training_s / share)


def best_share(work: Workload, max_lag: float) -> float:
    """Proposition 2, (10): β*, the share of training workers that minimizes (9); in (0, 1).

    E·N·μ_train / (N·μ_gen + K·L_gen/(α+1) + E·N·μ_train). It treats the tail as work that more workers would shorten.
    """
    _check(max_lag)
    return work.training_s / balanced_bound(work, max_lag)


def balanced_bound(work: Workload, max_lag: float) -> float:
    """Proposition 2, (11): (9) at β*, N/K·(μ_gen + E·μ_train) + L_gen/(α+1). With α = 0 this is (8)."""
    _check(max_lag)
    return work.generating_s + work.training_s + work.longest_s / (max_lag + 1)


def speed_up_limit(work: Workload) -> float:
    """Proposition 2: (8) over (11) as α → ∞, 1 + K·L_gen / (N·(μ_gen + E·μ_train))."""
    return synchronous_bound(work) / (work.generating_s + work.training_s)


def paced_bound(work: Workload, max_lag: float, share: float) -> float:
    """Bound under our admission rule: max(t, g + (t + L_gen) / n), with n = ⌊α⌋ + 1, for any α.

    g = N·μ_gen / ((1-β)K), t = E·N·μ_train / (βK). Rollout runs n versions ahead of training and then waits, so it
    waits for one update in n versions. With α = 0 it is the sum g + t + L_gen: the synchronous time, on split workers.
    A bound if any n versions take the mean work; if times vary, the mean of a maximum exceeds the maximum of the means,
    and the guaranteed bound is g + max(t, (t + L_gen) / n).
    """
    _check(max_lag, share)
    training = work.training_s / share
    return max(training, work.generating_s / (1 - share) + (training + work.longest_s) / (math.floor(max_lag) + 1))


def best_split(work: Workload, bound: Callable[[float], float]) -> int:
    """Number of training workers, 1 to K-1, that minimizes `bound`, a function of their share."""
    if work.workers < 2:
        raise ValueError("workers is 1; it takes 2 for some to train while others generate")
    return min(range(1, work.workers), key=lambda training: bound(training / work.workers))


def _check(max_lag: float = 0.0, share: float = 0.5) -> None:
    if not 0 <= max_lag < math.inf:
        raise ValueError(f"max_lag is {max_lag:g}; make it 0 or more, and finite")
    if not 0 < share < 1:
        raise ValueError(f"share is {share:g}; the share of workers that train lies between 0 and 1")


# ------------------------------------------------------------ the longest of several samples

#: Draws per sample of the maximum, and their minimum and maximum in total.
_PER_SAMPLE, _LEAST, _MOST = 32, 20_000, 1_000_000


def expected_longest(times: Distribution, samples: int, seed: int = 0) -> float:
    """E max of `samples` draws, seconds; the same for the same seed.

    An unbounded distribution has no L_gen; proposition 1 holds in expectation with this in its place: of the N samples
    of a version if synchronous, of the (⌊α⌋+1)·N concurrent ones if asynchronous. An estimate, accurate to some
    per cent for long tails; above 30,000 samples it is slightly low.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; make it at least 1")
    rng = random.Random(seed)
    draws = min(max(_PER_SAMPLE * samples, _LEAST), _MOST)
    return expected_maximum(sorted(times.sample(rng) for _ in range(draws)), samples)


def expected_maximum(ordered: Sequence[float], count: int) -> float:
    """E max of `count` values drawn with replacement from `ordered`, smallest first.

    Example: of [1, 3], two values: 3 unless both are 1, so 2.5.
    """
    total = len(ordered)
    below, expected = 0.0, 0.0
    for rank, value in enumerate(ordered, 1):
        upto = (rank / total) ** count
        expected += value * (upto - below)
        below = upto
    return expected


# ------------------------------------------------------------ all bounds at once


def advise(
    work: Workload, max_lag: float, pool_longest_s: float, reached_s: float = 0.0, measured: StageTimes | None = None
) -> dict[str, Any]:
    """All predictions as plain data. Raises ValueError for invalid inputs.

    work: with the longest of one version's samples; pool_longest_s: longest of all concurrent samples if asynchronous.
    reached_s: expected time of a version's longest sample, 0 if only a limit is known.

    splits: by whole workers, where (9) is least and where both stages take equal time. A speed-up there lies between
    the floor of T_sync over T_async's bound (below α = 1 the paced one, since (9) does not hold) and (8) over
    T_async's floor.
    """
    pool = replace(work, longest_s=pool_longest_s)
    synchronous, balanced = synchronous_bound(work), balanced_bound(pool, max_lag)
    floor = synchronous_floor(work, reached_s)
    bound, pace = partial(asynchronous_bound, pool, max_lag), partial(asynchronous_floor, pool)

    def split(training: int) -> dict[str, Any]:
        share = training / work.workers
        paced = paced_bound(pool, max_lag, share)
        return {
            "training": training,
            "generating": work.workers - training,
            "t_async_floor_s": pace(share),
            "t_async_s": bound(share),
            "paced_s": paced,
            "speed_up_least": floor / (bound(share) if max_lag >= 1 else paced),
            "speed_up_most": synchronous / pace(share),
        }

    return {
        "given": {**asdict(work), "max_lag": max_lag, "pool_longest_s": pool_longest_s},
        "t_sync_s": synchronous,
        "t_sync_floor_s": floor,
        "t_async_s": balanced,
        "share": best_share(pool, max_lag),
        "speed_up": synchronous / balanced,
        "speed_up_limit": speed_up_limit(work),
        "splits": {"best_share": split(best_split(pool, bound)), "equal_pace": split(best_split(pool, pace))},
        "measured": asdict(measured) if measured else None,
    }


# ------------------------------------------------------------ stage times of a finished run

#: Source of `longest_s`.
Limit = Literal["segment_steps", "max_steps", "metrics"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Quantities from a run's configuration.

    parts: threads of a simulator (env batches); mean_over: number of parts over which a simulator's utilisation is
    averaged (all in processes, 1 in one thread); rows: of all env batches of all simulators; max_steps: env steps of an
    episode, 0 if unknown.
    """

    version_samples: int
    versions: int
    simulators: int
    parts: int
    mean_over: int
    generators: int
    rows: int
    segment_steps: int = 0
    max_steps: int = 0


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Measured stage times.

    | quantity | source |
    |---|---|
    | samples (N) | `training.batch_size` × `freshness.sync_interval` of the configuration |
    | workers (K) | given, or the number of sequential parts: the env batches' threads, generators, the trainer |
    | rollout_s (μ_gen) | seconds that simulators and generators were busy in `rl`, per trained sample |
    | train_s (μ_train) | seconds that the trainer was busy in `rl`, per trained sample: all epochs, so passes is 1 |
    | longest_s (L_gen) | rollout_s × rows / K × (longest over mean sample) |
    | version_s | `wall_s.rl` / `training.versions`: wall time, waiting included |

    Busy in `rl` is `utilisation` × `wall_s.rl` of summary.json: unlike `stations.busy_s` it excludes evaluations and
    covers every part of a resumed run. Rows share the workers, so an episode lasts rows / K times as long as its own
    work; this matches the factor 1/(1-β) of (9). The longest sample is `rollout.segment_steps` chunk steps if set, else
    `env.max_steps` env steps, else (no known limit) the largest mean of an update, which is too low.
    """

    samples: int
    workers: int
    rollout_s: float
    longest_s: float
    train_s: float
    version_s: float
    limit: Limit


def stage_times(
    layout: Layout, summary: Mapping[str, Any], updates: Iterable[Mapping[str, Any]], workers: int | None = None
) -> StageTimes:
    """Stage times from `summary` (summary.json) and `updates` (lines of metrics.jsonl, all phases).

    workers: number of processors that the stations shared, if it differs from the number of parts.
    Raises ValueError if the run trained nothing, or an older version wrote the files.
    """
    try:
        trained, rl_s = summary["ledger"]["trained"], summary["wall_s"]["rl"]
        utilisation: Mapping[str, float] = summary["utilisation"]
    except KeyError as error:
        raise ValueError(f"summary.json has no {error.args[0]}; name a run that trained to its end") from None
    if not trained:
        raise ValueError("ledger.trained is 0 in summary.json; name a run that trained")
    rollout_s = trainer_s = 0.0
    for name, busy in utilisation.items():
        if name.endswith("-evaluation"):  # serves only evaluations
            continue
        if name.startswith("trainer"):
            trainer_s += busy * rl_s
        else:
            rollout_s += busy * rl_s * (layout.mean_over if name.startswith("simulator") else 1)
    workers = workers or layout.simulators * layout.parts + layout.generators + 1
    ratio, limit = _longest_over_mean(layout, updates)
    return StageTimes(
        samples=layout.version_samples,
        workers=workers,
        rollout_s=rollout_s / trained,
        longest_s=max(1.0, ratio * layout.rows / workers) * rollout_s / trained,
        train_s=trainer_s / trained,
        version_s=rl_s / layout.versions,
        limit=limit,
    )


def _longest_over_mean(layout: Layout, updates: Iterable[Mapping[str, Any]]) -> tuple[float, Limit]:
    """Longest over mean sample, at least 1, and the source of the longest."""
    chunks, steps = [], []
    for line in updates:
        if line.get("env/sample_chunk_steps") and line.get("env/sample_env_steps"):
            chunks.append(line["env/sample_chunk_steps"])
            steps.append(line["env/sample_env_steps"])
    if not chunks:
        raise ValueError("metrics.jsonl has no env/sample_chunk_steps; name a run that trained")
    if layout.segment_steps:
        return max(1.0, layout.segment_steps / fmean(chunks)), "segment_steps"
    if layout.max_steps:
        return max(1.0, layout.max_steps / fmean(steps)), "max_steps"
    return max(chunks) / fmean(chunks), "metrics"
