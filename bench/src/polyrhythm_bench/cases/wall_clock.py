"""Time to the same success where every stage takes its time: lock-step against full asynchrony, in real processes.

CartPole with added sleeps: 10 ms for each step of an env batch, 10 ms for each forward pass that acts, and training as
long as 30% of the lock-step rollout. Sleeping takes no core, so what is compared is who waits for whom. All modes have
the same rows, as many as an update has samples: in lock-step they all wait for the longest episode, for the forward
pass and for training; otherwise a row begins its next episode at once while training goes on, and one of two slots
steps while the other waits for its answer. A step takes as long for four rows as for eight, so the slots alone gain
nothing. Success is a mean return of `GOAL` over the last `EPISODES` training episodes that ended.

How long an update sleeps follows from a run in lock-step that does not sleep but has the same episodes as the slow one:

    training per chunk step = 0.3 · (forward passes · 20 ms) / (chunk steps · (epochs + 1))

(each chunk step is evaluated once per epoch, and once before for the proximal policy). The computing of both comes on
top; `training_over_rollout` is the ratio that was measured. Runs never overlap.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import Any, ClassVar

from polyrhythm.config.load import load_config, validate
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.base import Observer
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.observers.totals import RunTotals
from polyrhythm.pipeline.run_loop import Interrupted
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.runtime.messages import Report
from polyrhythm.scheduler import records
from polyrhythm_bench.cases.learning import CARTPOLE
from polyrhythm_bench.harness.curves import Goal

log = logging.getLogger(__name__)

STEP_MS, ACT_MS, TRAINING_SHARE = 10.0, 10.0, 0.3
GOAL, EPISODES = 80.0, 64
#: Least speed-up to the same success that the design allows.
LIMIT = 1.3

#: As in `learning`, but for the size of a version and as many rows as it has samples.
_SETTINGS = (*CARTPOLE.settings, "rollout.rows=8", "training.mini_batch_samples=8", "training.versions=200")
_ASYNC = ("preset=partial_rollout", "rollout.sharding=even:2", "batching.max_wait_ms=0")
#: The first mode is the one that the others are compared with.
MODES: dict[str, tuple[str, ...]] = {
    "lockstep": ("preset=lockstep", "rollout.sharding=whole"),
    "async_1": (*_ASYNC, "freshness.max_lag=1"),
    "async_2": (*_ASYNC, "freshness.max_lag=2"),
}


def run(seeds: int = 3) -> dict[str, Any]:
    """Every mode with seeds 0..seeds-1 in turns; what `summarise` returns, and how it was measured."""
    config = _config("lockstep", 0)
    evaluate_ms = training_ms(fast(config, Goal(GOAL, EPISODES)), config.training.epochs)
    log.info("training sleeps %.3f ms for each chunk step evaluated", evaluate_ms)
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for seed in range(seeds):
        for mode, own in runs.items():
            own.append(time_to_goal(slowed(_config(mode, seed), evaluate_ms), Goal(GOAL, EPISODES)))
            log.info("seed %d, %s: %s", seed, mode, own[-1])
    return {
        "settings": list(_SETTINGS),
        "seeds": list(range(seeds)),
        "goal": GOAL,
        "episodes": EPISODES,
        "step_ms": STEP_MS,
        "act_ms": ACT_MS,
        "evaluate_ms": evaluate_ms,
        **summarise(runs),
    }


def summarise(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Summary of the runs by mode, in the order of the seeds.

    `within_limit`; training_over_rollout (of the first mode, over all seeds); modes: seconds (median over the seeds),
    speedup (the first mode's median over its own), versions and ended (episodes) until the goal, lag_mean, means over
    the seeds; by seed `seconds_by_seed`, `versions_by_seed` and `speedup_by_seed`.
    """
    lockstep = next(iter(runs.values()))
    first = [one["seconds"] for one in lockstep]
    training_s = sum(one["training_s"] for one in lockstep)
    modes: dict[str, dict[str, Any]] = {}
    for name, own in runs.items():
        seconds = [one["seconds"] for one in own]
        modes[name] = {
            "settings": list(MODES[name]),
            "seconds": median(seconds),
            "speedup": median(first) / median(seconds),
            **{key: fmean(one[key] for one in own) for key in ("versions", "ended", "lag_mean")},
            "seconds_by_seed": seconds,
            "versions_by_seed": [one["versions"] for one in own],
            "speedup_by_seed": [theirs / mine for theirs, mine in zip(first, seconds, strict=True)],
        }
    compared = list(modes.values())[1:]
    return {
        "within_limit": all(mode["speedup"] >= LIMIT for mode in compared),
        "training_over_rollout": training_s / (sum(first) - training_s),
        "modes": modes,
    }


def _config(mode: str, seed: int) -> RunConfig:
    return load_config(CARTPOLE.recipe, [*_SETTINGS, *MODES[mode], f"seed={seed}"])


def slowed(config: RunConfig, evaluate_ms: float, step_ms: float = STEP_MS, act_ms: float = ACT_MS) -> RunConfig:
    """The configuration with an environment and a policy that sleep."""
    tree = config.model_dump(mode="json")
    here = "polyrhythm_bench.workloads"
    tree["env"] = {"type": f"{here}.slow_env:SlowEnvSettings", "env": tree["env"], "step_ms": step_ms}
    tree["policy"] = {
        "type": f"{here}.slow_policy:SlowPolicySettings",
        "policy": tree["policy"],
        "act": f"{act_ms:f}ms",
        "evaluate": f"0ms+{evaluate_ms:f}ms",
    }
    return validate(tree)


class StageTotals(Observer):
    """An observer: forward passes, chunk steps of finished samples, seconds of updates and their number."""

    hears: ClassVar[tuple[type, ...]] = (records.SampleFinished, records.BatchDone)

    def __init__(self) -> None:
        self.passes = self.chunk_steps = self.updates = 0
        self.training_s = 0.0

    def on_decision(self, now: float, event: records.Event, commands: Sequence[records.Command]) -> None:  # noqa: ARG002
        if isinstance(event, records.SampleFinished):
            self.chunk_steps += event.chunk_steps
        self.passes += isinstance(event, records.BatchDone)

    def on_report(self, now: float, report: Report) -> None:  # noqa: ARG002
        self.updates += 1
        self.training_s += report.values["time/actor/update"]


def fast(config: RunConfig, goal: Goal) -> StageTotals:
    """The run up to the goal, in one process, with nothing to slow it down. RunHalted: the goal was not reached."""
    stages = StageTotals()
    _run(config.model_copy(update={"launcher": "inline"}), [stages], goal, None)
    return stages


def training_ms(stages: StageTotals, epochs: int) -> float:
    """Milliseconds that training is to sleep for each chunk step that it evaluates."""
    rollout_ms = stages.passes * (STEP_MS + ACT_MS)
    return TRAINING_SHARE * rollout_ms / (stages.chunk_steps * (epochs + 1))


def time_to_goal(config: RunConfig, goal: Goal) -> dict[str, Any]:
    """seconds from the start of training to the goal; by then: versions trained, episodes ended, lag_mean, training_s.

    RunHalted: the goal was not reached, or a station was lost, so the time says nothing.
    """
    stages, totals, lags = StageTotals(), RunTotals(), LagHistogram()
    with tempfile.TemporaryDirectory(prefix="polyrhythm-") as folder:
        seconds = _run(config, [stages, totals, lags], goal, Path(folder))
    totals.refuse_faults()
    return {
        "seconds": seconds,
        "versions": stages.updates,
        "ended": goal.ended,
        "lag_mean": lags.summary()["mean"],
        "training_s": stages.training_s,
    }


def _run(config: RunConfig, observers: Sequence[Any], goal: Goal, folder: Path | None) -> float:
    """Train until the goal; the seconds that it took. RunHalted: the last version came first."""
    checked = validate_run(config)
    with closing(build_pipeline(RunContext(checked.config, folder=folder))) as pipeline:
        loop = pipeline.loop
        loop.add_observers(*observers, goal)
        loop.stop = lambda: goal.reached
        began = loop.clock()
        try:
            loop.train_until(config.training.versions)
        except Interrupted:
            return goal.at - began
    versions = config.training.versions
    raise RunHalted(
        f"seed {config.seed}: no mean return of {goal.least:g} in {versions} versions, so no time to compare"
    )
