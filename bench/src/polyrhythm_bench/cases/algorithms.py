"""Every policy loss at growing staleness α, with the same budget and seeds; advantages of groups and sampling methods
of a flow policy too, each on a task that has those.

α = 0 is lock-step; above it rollout never waits for training, and samples are about α versions old (which is measured).
Everything else is equal: rows (enough to keep α = 8 busy), tickets, initial weights, learning rate, epochs. The metric
is the area under the learning curve: the mean return over all tickets. Lag costs area with any objective,
since a ticket is granted α versions early; so objectives are compared within one α, to the best one there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from polyrhythm_bench.harness import trainings
from polyrhythm_bench.harness.curves import curve, ratio_of_means
from polyrhythm_bench.harness.trainings import TrainingTask

ALPHAS = (0, 1, 2, 4, 8)
#: Settings of `algorithm` by the name of an objective. `ppo_behavior` is plain PPO on stale data.
LOSSES: dict[str, tuple[str, ...]] = {
    "ppo_behavior": ("algorithm.loss=ppo", "algorithm.proximal=behavior"),
    "ppo": ("algorithm.loss=ppo",),
    "clip_higher": ("algorithm.loss={type: ppo, clip_high: 0.28}",),
    "dual_clip": ("algorithm.loss={type: ppo, dual_clip: 3.0}",),
    "decoupled_ppo": ("algorithm.loss=decoupled_ppo",),
    "decoupled_interpolate": ("algorithm.loss=decoupled_ppo", "algorithm.proximal=interpolate"),
    "gspo": ("algorithm.loss=gspo",),
    "vanilla": ("algorithm.loss=vanilla",),
    "tis": ("algorithm.loss=tis",),
    "cispo": ("algorithm.loss=cispo",),
    "topr": ("algorithm.loss=topr",),
    "weighted_topr": ("algorithm.loss={type: topr, negative_weight: 0.5}",),
    "sapo": ("algorithm.loss=sapo",),
    "gipo": ("algorithm.loss=gipo",),
    "gipo_half": ("algorithm.loss={type: gipo, sigma: 0.5}",),
    "clip_cov": ("algorithm.loss=clip_cov",),
    "kl_cov": ("algorithm.loss=kl_cov",),
    "m2po": ("algorithm.loss=m2po",),
    "v_trace": ("algorithm.loss={type: tis, cap: 1.0}", "algorithm.advantage=v_trace"),
}
_FLOW = "policy.head={type: flow_matching, steps: 4, method: {type: %s}}"
#: On the task chains, and on the task spot.
ADVANTAGES = {name: (f"algorithm.advantage={name}",) for name in ("grpo", "rloo", "maxrl")}
METHODS = {name: (_FLOW % name,) for name in ("flow_noise", "flow_sde", "flow_cps")} | {
    "flow_cps_most": (_FLOW % "flow_cps, noise: 0.8",)
}
OBJECTIVES = LOSSES | ADVANTAGES | METHODS
_MANY_ROWS = ("rollout.rows=36", "rollout.sharding=even:9", "training.mini_batch_samples=4")
TASKS = {
    "cartpole": TrainingTask(
        "cartpole",
        (
            *_MANY_ROWS,
            *("training.versions=100", "training.epochs=4", "training.optimizer.lr=5.0e-4"),
            *("env.max_steps=100", "rollout.segment_steps=0"),
        ),
        window=20,
    ),
    "drawer": TrainingTask(
        "reach",
        (
            *_MANY_ROWS,
            *("training.versions=80", "training.epochs=4", "training.minibatch_steps=80"),
            *("env.tasks=[drawer-close-v3]", "env.max_steps=50", "rollout.action_repeat=5"),
        ),
        window=20,
    ),
    "chains": TrainingTask(
        "quickstart_lm",
        (
            *("rollout.rows=288", "training.versions=64", "training.mini_batch_samples=32"),
            *("env.terms=[2,4]", "env.max_new_tokens=32"),
            *("policy.layers=2", "policy.width=48", "policy.heads=2", "policy.hidden=128"),
            *("training.optimizer.lr=3.0e-4", "training.optimizer.lr_final_fraction=1.0"),
            "training.minibatch_steps=32",
            *("demonstrations.episodes_per_task=3000", "supervised.steps=400", "supervised.lr=4.0e-3"),
        ),
        window=128,
    ),
    "spot": TrainingTask(
        "quickstart",
        (
            *("rollout.simulators=1", "rollout.rows=144", "rollout.sharding=even:9", "rollout.action_repeat=1"),
            *("rollout.segment_steps=0", "training.versions=160", "training.mini_batch_samples=16"),
            *(
                "training.optimizer={lr: 2.0e-4, lr_final_fraction: 0.4, value_lr: 2.0e-3}",
                "algorithm.gamma=0.9",
                "algorithm.bootstrap=never",
            ),
            "env={type: polyrhythm_bench.workloads.spot_env:SpotSettings, reward: progress}",
            *("policy.width=32", "policy.layers=1", "evaluation.swapped=false"),
            *("demonstrations.episodes_per_task=64", "supervised.steps=40"),
        ),
        window=128,
    ),
}
#: Of the tasks that do not compare losses.
COMPARED: Mapping[str, Mapping[str, tuple[str, ...]]] = {"chains": ADVANTAGES, "spot": METHODS}


def run(
    tasks: Mapping[str, TrainingTask],
    seeds: int = 5,
    objectives: Sequence[str] = (),
    alphas: Sequence[int] = ALPHAS,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train every task with each of its objectives (of the named ones, if any) at every α with seeds 0..seeds-1; for
    each task that has some what `summarise` returns. folder: see `trainings.compare`."""
    chosen = {name: ways for name in tasks if (ways := ways_of(name, objectives, alphas))}
    for name, ways in chosen.items():
        trainings.check_tasks({name: tasks[name]}, ways)
    found: dict[str, Any] = {}
    for name, ways in chosen.items():
        found |= trainings.compare({name: tasks[name]}, ways, seeds, summarise, may_halt=True, folder=folder)
    return found


class Way(NamedTuple):
    """An objective at one α."""

    objective: str
    alpha: int

    def __str__(self) -> str:
        return f"{self.objective}, α = {self.alpha}"


def ways_of(task: str, objectives: Sequence[str], alphas: Sequence[int]) -> dict[Way, tuple[str, ...]]:
    """The settings of each of a task's objectives (of those among the named ones, if any) at each α."""
    own = [name for name in COMPARED.get(task, LOSSES) if name in (objectives or OBJECTIVES)]
    return {Way(name, alpha): settings(name, alpha) for name in own for alpha in alphas}


def settings(objective: str, alpha: int) -> tuple[str, ...]:
    """The settings of a way, laid over the task's."""
    mode = (
        ("preset=partial_rollout", f"freshness.max_lag={alpha}")
        if alpha
        else ("preset=lockstep", "rollout.sharding=whole")
    )
    return (*mode, *OBJECTIVES[objective])


def summarise(runs: Mapping[Way, Sequence[Mapping[str, Any]]], window: int) -> dict[str, Any]:
    """Summary of one task's runs, by objective and α, in the order of the seeds.

    samples, window; cells: for each objective and α the area (mean return over all tickets, mean over the seeds),
    `of_best` with its interval low to high (paired bootstrap, 95%; the best is the largest area at this α), last (mean
    return of the last window), lag_mean, halted (runs), and by seed `areas` and `curves`; choose: by α the objectives
    whose interval reaches the best.
    """
    areas = {key: [fmean(one["returns"]) for one in own] for key, own in runs.items()}
    cells: list[dict[str, Any]] = []
    choose: dict[str, list[str]] = {}
    for way, own in runs.items():
        name, alpha = way
        best = max((key for key in areas if key[1] == alpha), key=lambda key: fmean(areas[key]))
        curves = [curve(one["returns"], window) for one in own]
        compared = ratio_of_means(areas[way], areas[best])
        cells.append(
            {
                "objective": name,
                "alpha": alpha,
                "area": fmean(areas[way]),
                "of_best": compared["ratio"],
                "low": compared["low"],
                "high": compared["high"],
                "last": fmean(points[-1] for points in curves),
                "lag_mean": fmean(one["lag_mean"] for one in own),
                "halted": sum(bool(one["halted"]) for one in own),
                "areas": areas[way],
                "curves": curves,
            }
        )
        if compared["high"] >= 1.0:
            choose.setdefault(str(alpha), []).append(name)
    samples = len(next(iter(runs.values()))[0]["returns"])
    return {"samples": samples, "window": window, "choose": choose, "cells": cells}
