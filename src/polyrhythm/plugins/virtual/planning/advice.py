"""Evaluates the theory for one case: version times, split of the workers, gain of asynchronous training; and computes
the stage times of a finished run, in the terms of `theory`.

| quantity | source |
|---|---|
| samples (N) | `training.batch_size` × `freshness.sync_interval` of the configuration |
| workers (K) | given, or the number of sequential parts: the env batches' threads, generators, the trainer |
| rollout_s (μ_gen) | seconds that simulators and generators were busy in `rl`, per trained sample |
| train_s (μ_train) | seconds that the trainer was busy in `rl`, per trained sample: all epochs, so passes is 1 |
| longest_s (L_gen) | rollout_s × rows / K × (longest over mean sample) |
| version_s | `wall_s.rl` / `training.versions`: wall time, waiting included |

Busy in `rl` is `utilisation` × `wall_s.rl` of summary.json: unlike `stations.busy_s` it excludes evaluations and covers
every part of a resumed run. Rows share the workers, so an episode lasts rows / K times as long as its own work; this
matches the factor 1/(1-β) of (9). The longest sample is `rollout.segment_steps` chunk steps if set, else
`env.max_steps` env steps, else (no known limit) the largest mean of an update, which is too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

from polyrhythm.plugins.virtual.planning import theory
from polyrhythm.plugins.virtual.planning.theory import Workload


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of a prediction.

    work: with the longest of one version's samples; pool_longest_s: longest of all concurrent samples if asynchronous.
    reached_s: expected time of a version's longest sample, 0 if only a limit is known.
    """

    work: Workload
    max_lag: float
    pool_longest_s: float
    reached_s: float = 0.0
    measured: Profile | None = None


def advise(case: Case) -> dict[str, Any]:
    """All predictions as plain data. Raises ValueError for invalid inputs.

    splits: by whole workers, where (9) is least and where both stages take equal time. A speed-up there lies between
    the floor of T_sync over T_async's bound (below α = 1 the paced one, since (9) does not hold) and (8) over
    T_async's floor.
    """
    work, max_lag = case.work, case.max_lag
    pool = replace(work, longest_s=case.pool_longest_s)
    synchronous, balanced = theory.synchronous_bound(work), theory.balanced_bound(pool, max_lag)
    floor = theory.synchronous_floor(work, case.reached_s)
    bound, pace = partial(theory.asynchronous_bound, pool, max_lag), partial(theory.asynchronous_floor, pool)

    def split(training: int) -> dict[str, Any]:
        share = training / work.workers
        paced = theory.paced_bound(pool, max_lag, share)
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
        "given": {**asdict(work), "max_lag": max_lag, "pool_longest_s": case.pool_longest_s},
        "t_sync_s": synchronous,
        "t_sync_floor_s": floor,
        "t_async_s": balanced,
        "share": theory.best_share(pool, max_lag),
        "speed_up": synchronous / balanced,
        "speed_up_limit": theory.speed_up_limit(work),
        "splits": {
            "best_share": split(theory.best_split(pool, bound)),
            "equal_pace": split(theory.best_split(pool, pace)),
        },
        "measured": asdict(case.measured) if case.measured else None,
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
class Profile:
    """Measured stage times, as in the table above."""

    samples: int
    workers: int
    rollout_s: float
    longest_s: float
    train_s: float
    version_s: float
    limit: Limit


def profile(
    layout: Layout, summary: Mapping[str, Any], updates: Iterable[Mapping[str, Any]], workers: int | None = None
) -> Profile:
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
    return Profile(
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
