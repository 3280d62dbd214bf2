"""Learning in lock-step and in full asynchrony at α = 1 and 2, seed by seed, with the same budget.

    lockstep   preset lockstep
    async_1    preset partial_rollout, no sample more than 1 version behind the trainer
    async_2    the same, 2 versions

Everything else is equal: recipe, rows (as many as α = 2 can keep at work), slots of as many rows as an update has
samples, tickets, initial weights. Each run is one process (launcher inline: learning is compared, not time; rollout
and training still alternate at every forward pass and optimizer step, so the lags are near α; they are measured), one
run per core at a time. `wall_clock` compares time.

What lag costs is a number of versions: α until a version's own episodes are trained on, and some more for learning from
older ones while every version changes the policy much. So the ratio of the areas depends on how many versions the
budget has, and on how many of them the task takes to be learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyrhythm_bench.harness import trainings
from polyrhythm_bench.harness.curves import curve, ratio_of_means
from polyrhythm_bench.harness.trainings import TrainingTask

#: Least ratio of the areas, and least lower end of its interval, that the design allows.
LIMITS = {"ratio": 0.97, "low": 0.90}

#: The first mode is the one that the others are compared with.
MODES: dict[str, tuple[str, ...]] = {
    "lockstep": ("preset=lockstep",),
    "async_1": ("preset=partial_rollout", "freshness.max_lag=1"),
    "async_2": ("preset=partial_rollout", "freshness.max_lag=2"),
}


#: What both tasks of the default have: many small versions, 1,600 episodes in all.
_SMALL = (
    *("rollout.rows=12", "rollout.sharding=even:3"),
    *("training.versions=400", "training.mini_batch_samples=4"),
)
#: Whole episodes are samples, and end after 100 steps.
CARTPOLE = TrainingTask(
    "cartpole",
    (*_SMALL, "env.max_steps=100", "rollout.segment_steps=0", "training.epochs=4", "training.optimizer.lr=5.0e-4"),
    window=40,
)
#: Meta-World's drawer-close by its state, each action held for five steps.
DRAWER = TrainingTask(
    "reach",
    (
        *_SMALL,
        *("env.tasks=[drawer-close-v3]", "env.max_steps=50", "rollout.action_repeat=5", "training.minibatch_steps=80"),
    ),
    window=40,
)
#: The unchanged recipe. The policy improves through all 60 versions, so lag costs more of the area.
REACH = TrainingTask("reach", ("rollout.rows=48", "rollout.sharding=even:3"), window=32)
#: The quickstart from pixels, with half of the recipe's episodes and one simulator. Its steps are smaller:
#: with the recipe's own, curves of one mode differ by half, and three seeds cannot tell what lag costs.
QUICKSTART = TrainingTask(
    "quickstart",
    (
        *("rollout.simulators=1", "rollout.rows=96", "rollout.sharding=even:3", "training.versions=200"),
        *("demonstrations.episodes_per_task=8", "supervised.steps=120", "training.optimizer.lr_final_fraction=0.4"),
        *("training.epochs=2", "training.minibatch_steps=128", "training.optimizer.lr=2.0e-4"),
    ),
    window=320,
)
TASKS = {"cartpole": CARTPOLE, "drawer": DRAWER, "reach": REACH, "quickstart": QUICKSTART}


def run(tasks: Mapping[str, TrainingTask], seeds: int = 8, folder: Path | None = None) -> dict[str, Any]:
    """Train every task in every mode with seeds 0..seeds-1; for each task what `summarise` returns, and its settings.
    folder: see `trainings.compare`."""
    return trainings.compare(tasks, MODES, seeds, summarise, folder=folder)


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]], window: int) -> dict[str, Any]:
    """Summary of one task's runs by mode, in the order of the seeds.

    samples, window; `within_limits`; modes: area (mean return over all tickets, mean over seeds), success (likewise),
    last (mean return of the last window), lag_mean and seconds of a run, means over seeds; ratio, low, high of the
    areas to the first mode's; by seed `areas`, `lags`, `curves` and `success_curves`.
    """
    first = [fmean(one["returns"]) for one in next(iter(runs.values()))]
    modes: dict[str, dict[str, Any]] = {}
    for name, own in runs.items():
        areas = [fmean(one["returns"]) for one in own]
        curves = [curve(one["returns"], window) for one in own]
        modes[name] = {
            "area": fmean(areas),
            **({} if not modes else ratio_of_means(areas, first)),
            "success": fmean(fmean(one["successes"]) for one in own),
            "last": fmean(points[-1] for points in curves),
            "lag_mean": fmean(one["lag_mean"] for one in own),
            "seconds": fmean(one["seconds"] for one in own),
            "areas": areas,
            "lags": [one["lag_mean"] for one in own],
            "curves": curves,
            "success_curves": [curve(one["successes"], window) for one in own],
        }
    compared = list(modes.values())[1:]
    return {
        "samples": len(next(iter(runs.values()))[0]["returns"]),
        "window": window,
        "within_limits": all(mode[name] >= least for mode in compared for name, least in LIMITS.items()),
        "modes": modes,
    }
