"""Compares the bounds of ROLL Flash, section 3.1, with the simulated cluster: the real conductor on a virtual clock.

    python bench/scripts/theory.py [--versions 60] [--out bench/results/theory.md]

N = 64 samples a version, training 3 s a sample on one worker, a rollout of 10 s in the mean, K workers. Synchronous: K
slots and an update at the pace of K workers, max_lag 0 with `drain`. Asynchronous: whole workers are split by β* (where
(9) is least) or at equal pace (where the floor is); generating workers are slots of one row, training workers set the
pace of the update. Inference, publication and messages take no time, because the theory ignores them. The first
versions of a run are left out. An error is theory / simulated - 1.
"""

from __future__ import annotations

import argparse
import datetime as dt
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polyrhythm.plugins.planning import theory
from polyrhythm.plugins.planning.theory import expected_longest
from polyrhythm.plugins.virtual.clustersim.cluster import VirtualCluster
from polyrhythm.plugins.virtual.clustersim.settings import ClusterSettings
from polyrhythm.scheduler.records import Command, Event, TrainUntil, UpdateDone
from polyrhythm.specs.distributions import parse_distribution
from polyrhythm_bench.harness.markdown import wrap_prose

#: Folder of the tables.
RESULTS = Path(__file__).parents[1] / "results"

SAMPLES, TRAIN_S = 64, 3.0
#: Versions left out at the beginning, and a number of versions that is never reached.
WARM_UP, ENDLESS = 10, 1_000_000
DISTRIBUTIONS = {
    "constant": "constant:10s",
    "normal, σ 5 s": "normal:10s:5s",
    "lognormal σ 0.8": "lognormal:10s:0.8",
    "lognormal σ 1.2": "lognormal:10s:1.2",
    "5% are 5× longer": "mixture:0.95*constant:8.3333s+0.05*constant:41.6667s",
}
WORKERS = (8, 32, 128)
LAGS = (1.0, 2.0, 4.0)
BOUNDS = ("sample", "mean")
BETA, PACE = "β*", "equal pace"
#: Settings of the search for the best split, and those in which little or nothing overlaps.
SEARCHED, SEARCH_LAG, SPLITS = ("constant", "lognormal σ 0.8", "5% are 5× longer"), 2.0, (3, 4, 5, 6, 7, 8, 9, 10, 12)
SMALL_LAG_ROLLOUTS, SMALL_LAGS = ("constant", "lognormal σ 0.8"), (0.0, 0.5)

INTRODUCTION = """\
Results of `polyrhythm plan --theory`, compared with the real conductor on a virtual clock. N = 64, rollout 10 s in the
mean, training 3 s a sample on one worker; seconds of a version. An error is theory / simulated - 1, so that a bound
that holds has none below 0.
"""
CONCLUSIONS = """\
Conclusions:

- **(8) is loose where the tail is as long as the rest.** It assumes that the longest sample begins last, when the other
  workers are idle; in fact it begins anywhere. Where the tail dominates (long tails, K = 128) it is close; errors below
  0 are chance, from sixty versions with rare samples.
- **(9) at β\\* is a fair estimate but not a bound.** It assumes that neither stage waits for the other. But admission
  counts the samples that are being trained on, so with α = 1 rollout prepares one version during an update and then
  waits. And the tail divided by α + 1 means one straggler for α + 1 versions; under `sample` each straggler is waited
  for, and long tails have more than one. `mean` waits for none: from α = 2 on (9) holds there.
- **β\\* gives training too few workers.** (10) counts the tail as work that more workers would shorten; no number of
  workers shortens one sample. At equal pace, β = E·μ_train / (μ_gen + E·μ_train), no version was longer, most with 32
  workers or more were shorter by a fifth at least, and (9) held everywhere. There it is loose, because the tail
  overlaps with other work.
- **The speed-up (8) over (9) is a ratio of two bounds.** It is off by 6 to 16% in the median, and above 1 where
  asynchronous training was slower: few workers that cannot be split evenly, and times that hardly vary. The range
  between the floors shows this.
- **Below α = 1 little or nothing overlaps.** (9) ignores this; the paced bound does not, and for α = 0 it is close. For
  larger α it is a reliable bound except for the longest tails, and a third or more too long.
"""


def simulated(distribution: str, slots: int, update_s: float, max_lag: float, bound: str, versions: int) -> float:
    """Seconds of a version in steady state."""
    settings = ClusterSettings.model_validate(
        {
            "scheduler": {
                "batch_size": SAMPLES,
                "max_lag": max_lag,
                "bound": bound,
                "on_update": "continue" if max_lag else "drain",
                "max_rows": 1,
                "max_wait_s": 0.0,
            },
            "simulators": [{"env_batches": slots, "episode_time": distribution}],
            "generators": [{}],
            "trainer": {"update": f"{update_s:.9f}s"},
        }
    )
    driver = VirtualCluster(settings).driver
    ends: list[float] = []

    def note(now: float, event: Event, commands: list[Command]) -> None:  # noqa: ARG001 (the driver's)
        if isinstance(event, UpdateDone):
            ends.append(now)

    driver.observer = note
    driver.submit(TrainUntil(ENDLESS))
    while len(ends) < WARM_UP + versions:
        driver.run(ENDLESS, driver.clock.now + 10 * update_s)
    return (ends[WARM_UP + versions - 1] - ends[WARM_UP - 1]) / versions


@dataclass(frozen=True, slots=True)
class Overlapped:
    """An asynchronous setting: theory and simulation, seconds of a version."""

    split: str
    max_lag: float
    bound: str
    training: int
    bound_s: float
    floor_s: float
    paced_s: float
    simulated_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A time distribution and a number of workers. bound_s, floor_s, simulated_s: of a synchronous version."""

    rollout: str
    workers: int
    bound_s: float
    floor_s: float
    simulated_s: float
    overlapped: tuple[Overlapped, ...]


def workload(rollout: str, workers: int, samples: int = SAMPLES) -> theory.Workload:
    """The theory's workload, its longest rollout the expected maximum of `samples`."""
    times = parse_distribution(DISTRIBUTIONS[rollout])
    return theory.Workload(SAMPLES, workers, times.mean, expected_longest(times, samples), TRAIN_S)


def pool(rollout: str, workers: int, max_lag: float) -> theory.Workload:
    """The workload with the expected maximum of all samples that are in flight at once."""
    return workload(rollout, workers, (int(max_lag) + 1) * SAMPLES)


def overlapped(rollout: str, workers: int, max_lag: float, bound: str, split: str, versions: int) -> Overlapped:
    work = pool(rollout, workers, max_lag)
    least: Callable[[float], float] = (
        partial(theory.asynchronous_bound, work, max_lag) if split == BETA else partial(theory.asynchronous_floor, work)
    )
    training = theory.best_split(work, least)
    share = training / workers
    return Overlapped(
        split,
        max_lag,
        bound,
        training,
        theory.asynchronous_bound(work, max_lag, share),
        theory.asynchronous_floor(work, share),
        theory.paced_bound(work, max_lag, share),
        simulated(DISTRIBUTIONS[rollout], workers - training, work.training_s / share, max_lag, bound, versions),
    )


def case(rollout: str, workers: int, versions: int) -> Case:
    work = workload(rollout, workers)
    return Case(
        rollout,
        workers,
        theory.synchronous_bound(work),
        theory.synchronous_floor(work, work.longest_s),
        simulated(DISTRIBUTIONS[rollout], workers, work.training_s, 0.0, "sample", versions),
        tuple(
            overlapped(rollout, workers, max_lag, bound, split, versions)
            for max_lag in LAGS
            for split in (BETA, PACE)
            for bound in BOUNDS
        ),
    )


# ---------------------------------------------------------------- tables


def percent(found: float) -> str:
    return f"{round(100 * found):+d}%" if round(100 * found) else "0%"


def grid(cases: Sequence[Case]) -> list[str]:
    """Markdown table of theory and error in each setting, at the split by β*."""
    heads = " | ".join(f"α={lag:g}: (9), error of `sample`, `mean`" for lag in LAGS)
    lines = [f"| rollout | K | (8), error | {heads} |", "|---|---|---|" + "---|" * len(LAGS)]
    for one in cases:
        cells = [f"{one.bound_s:.1f}, {percent(one.bound_s / one.simulated_s - 1)}"]
        for lag in LAGS:
            own = [a for a in one.overlapped if a.max_lag == lag and a.split == BETA]
            errors = ", ".join(percent(a.bound_s / a.simulated_s - 1) for a in own)
            cells.append(f"{own[0].bound_s:.1f}, {errors}")
        lines.append(f"| {one.rollout} | {one.workers} | {' | '.join(cells)} |")
    return lines


def row(name: str, errors: Iterable[float]) -> str:
    """Median, least and largest error, median without sign, and how often the bound holds (within half a per cent)."""
    found = list(errors)
    holds = sum(error >= -0.005 for error in found)
    amount = statistics.median(abs(error) for error in found)
    spread = f"{percent(statistics.median(found))} | {percent(min(found))} | {percent(max(found))}"
    return f"| {name} | {spread} | {100 * amount:.0f}% | {holds} of {len(found)} |"


def errors(cases: Sequence[Case]) -> list[str]:
    lines = ["| | median error | least | largest | median of the amount | holds |", "|---|---|---|---|---|---|"]
    lines.append(row("T_sync, (8)", (one.bound_s / one.simulated_s - 1 for one in cases)))
    every = [a for one in cases for a in one.overlapped]
    for lag in LAGS:
        for bound in BOUNDS:
            own = [a for a in every if (a.max_lag, a.bound, a.split) == (lag, bound, BETA)]
            lines.append(
                row(f"T_async, (9), by β*, α={lag:g}, `{bound}`", (a.bound_s / a.simulated_s - 1 for a in own))
            )
    for split in (BETA, PACE):
        for bound in BOUNDS:
            own = [a for a in every if (a.bound, a.split) == (bound, split)]
            where = f"{'by ' * (split == BETA)}{split}, `{bound}`"
            if split == PACE:
                lines.append(row(f"T_async, (9), {where}", (a.bound_s / a.simulated_s - 1 for a in own)))
            lines.append(row(f"paced bound, {where}", (a.paced_s / a.simulated_s - 1 for a in own)))
    return lines


def speed_ups(cases: Sequence[Case]) -> list[str]:
    lines = [
        "| | simulated: median, range | (8) over (9): median error | floor over (9) to (8) over floor | below 1 |",
        "|---|---|---|---|---|",
    ]
    for split in (BETA, PACE):
        for bound in BOUNDS:
            own = [(one, a) for one in cases for a in one.overlapped if (a.split, a.bound) == (split, bound)]
            gains = [one.simulated_s / a.simulated_s for one, a in own]
            off = [one.bound_s / a.bound_s / gain - 1 for (one, a), gain in zip(own, gains, strict=True)]
            inside = sum(
                one.floor_s / a.bound_s <= gain <= one.bound_s / a.floor_s
                for (one, a), gain in zip(own, gains, strict=True)
            )
            lines.append(
                f"| {'by ' * (split == BETA)}{split}, `{bound}` | {statistics.median(gains):.2f}, {min(gains):.2f} to "
                f"{max(gains):.2f} | {percent(statistics.median(off))} | holds {inside} of {len(own)} | "
                f"{sum(gain < 0.995 for gain in gains)} of {len(own)} |"
            )
    return lines


def splits(cases: Sequence[Case]) -> list[str]:
    """Markdown table: how much shorter a version is at equal pace, in the simulation."""
    lines = [
        "| equal pace against the split by β*, simulated | K=8 | K=32 | K=128 |",
        "|---|---|---|---|",
    ]
    for bound in BOUNDS:
        cells = []
        for workers in WORKERS:
            found = []
            for one in cases:
                if one.workers == workers:
                    times = {(a.split, a.max_lag): a.simulated_s for a in one.overlapped if a.bound == bound}
                    found += [times[PACE, lag] / times[BETA, lag] - 1 for lag in LAGS]
            spread = f"{percent(min(found))} to {percent(max(found))}"
            cells.append(f"{percent(statistics.median(found))} ({spread})")
        lines.append(f"| `{bound}`: median (range) | {' | '.join(cells)} |")
    return lines


def searched(versions: int) -> list[str]:
    """Markdown table: the best number of training workers in the simulation, and by theory."""
    workers = WORKERS[1]
    lines = [
        f"| rollout, K={workers}, α={SEARCH_LAG:g}, `sample` | best split, T | by β*, lost | at equal pace, lost |",
        "|---|---|---|---|",
    ]
    for rollout in SEARCHED:
        work = pool(rollout, workers, SEARCH_LAG)
        times = {
            training: simulated(
                DISTRIBUTIONS[rollout],
                workers - training,
                work.training_s * workers / training,
                SEARCH_LAG,
                "sample",
                versions,
            )
            for training in SPLITS
        }
        best = min(times, key=lambda training: times[training])
        beta = theory.best_split(work, partial(theory.asynchronous_bound, work, SEARCH_LAG))
        pace = theory.best_split(work, partial(theory.asynchronous_floor, work))
        cells = (f"{chosen}, {percent(times[chosen] / times[best] - 1)}" for chosen in (beta, pace))
        lines.append(f"| {rollout} | {best} train, {times[best]:.1f} | {' | '.join(cells)} |")
    return lines


def small_lags(versions: int) -> list[str]:
    workers = WORKERS[1]
    lines = [
        f"| rollout, K={workers}, by β* | α | simulated | (9), error | paced bound, error |",
        "|---|---|---|---|---|",
    ]
    for rollout in SMALL_LAG_ROLLOUTS:
        for lag in SMALL_LAGS:
            one = overlapped(rollout, workers, lag, "sample", BETA, versions)
            cells = (f"{value:.1f}, {percent(value / one.simulated_s - 1)}" for value in (one.bound_s, one.paced_s))
            lines.append(f"| {rollout} | {lag:g} | {one.simulated_s:.1f} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=60, help="versions of a run that count")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{Path(__file__).stem}.md")
    arguments = parser.parse_args()
    began = time.process_time()
    cases = [case(rollout, workers, arguments.versions) for rollout in DISTRIBUTIONS for workers in WORKERS]
    short = max(1, arguments.versions // 2)
    tables = [table(cases) for table in (grid, errors, speed_ups, splits)] + [searched(short), small_lags(short)]
    took, today = time.process_time() - began, dt.datetime.now(tz=dt.UTC).date()
    text = "\n".join(
        [
            "# Theory compared with simulation",
            "",
            f"`python bench/scripts/theory.py --versions {arguments.versions}`, {today}, {took:.0f} CPU seconds.",
            "",
            INTRODUCTION,
            *(line for table in tables for line in (*table, "")),
            CONCLUSIONS,
        ]
    )
    text = wrap_prose(text.rstrip())
    arguments.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
