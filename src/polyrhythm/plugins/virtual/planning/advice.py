"""Evaluates the theory for one case: version times, split of the workers, gain of asynchronous training."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from polyrhythm.plugins.virtual.planning import theory
from polyrhythm.plugins.virtual.planning.profile import Profile
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
