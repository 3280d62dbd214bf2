"""Trains every task in every way with every seed, for learning curves; one process per training, as many as cores.

The launcher is inline: what is compared is learning, not time. Rollout and training still alternate at every
forward pass and optimizer step, so the lags are near α; they are measured.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import psutil

from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.context import RunContext
from polyrhythm.pipeline.observers.metrics import LagHistogram
from polyrhythm.pipeline.persistence.checkpoints import POLICY_FILE
from polyrhythm.pipeline.validation.check import validate_run
from polyrhythm.plugins.demonstrations.warm_start import imitate
from polyrhythm_bench.harness.curves import EpisodeOutcomes
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.harness.worker import Answer, Worker

log = logging.getLogger(__name__)

Way = TypeVar("Way", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A recipe, settings over it, and how many tickets a point of its curve has."""

    recipe: str | Path
    settings: tuple[str, ...]
    window: int

    def config(self, way: Sequence[str], seed: int) -> RunConfig:
        """Of one training: the way's settings lie over the task's. Demonstrations, if any, have the seed as well."""
        config = load_config(self.recipe, [*self.settings, *way, "launcher=inline", f"seed={seed}"])
        if config.demonstrations is None:
            return config
        recorded = config.demonstrations.model_copy(update={"seed": seed})
        return config.model_copy(update={"demonstrations": recorded})


#: From the results of a task's trainings, by way and in the order of the seeds, and its window, to a summary.
Summarise = Callable[[Mapping[Way, Sequence[Mapping[str, Any]]], int], dict[str, Any]]


def compare(
    tasks: Mapping[str, TrainingTask],
    ways: Mapping[Way, Sequence[str]],
    seeds: int,
    summarise: Summarise[Way],
    *,
    may_halt: bool = False,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train every task in every way (settings by name) with seeds 0..seeds-1; for each task its recipe, settings and
    seeds, and what `summarise` makes of it. may_halt: see `train`. folder: where the results of finished trainings are
    kept; one with the same settings is not repeated."""
    jobs = [(name, way, seed) for name in tasks for seed in range(seeds) for way in ways]
    asked = [_Job(f"{name}, seed {seed}, {way}", tasks[name], ways[way], seed, may_halt) for name, way, seed in jobs]
    ended = dict(zip(jobs, _train_all(asked, folder), strict=True))
    return {
        name: {
            "recipe": str(task.recipe),
            "settings": list(task.settings),
            "seeds": list(range(seeds)),
            **summarise({way: [ended[name, way, seed] for seed in range(seeds)] for way in ways}, task.window),
        }
        for name, task in tasks.items()
    }


def check_tasks(tasks: Mapping[str, TrainingTask], ways: Mapping[Way, Sequence[str]]) -> None:
    """Raise ConfigError or StartError if one of the tasks cannot run here in one of the ways."""
    for task in tasks.values():
        for way in ways.values():
            validate_run(task.config(way, 0))


class _Job(NamedTuple):
    """One training: its name in the log, and the arguments of `TrainingTask.config` and `train`."""

    label: str
    task: TrainingTask
    way: Sequence[str]
    seed: int
    may_halt: bool

    def kept(self, folder: Path | None) -> tuple[KeptResults, str]:
        """Where its result is kept, and the result's name there."""
        settings = self.task.config(self.way, self.seed).model_dump(mode="json")
        return KeptResults(folder, settings, replaces=True), re.sub("[^a-zA-Z0-9_.]+", "-", self.label)


def _train_all(jobs: Sequence[_Job], folder: Path | None) -> list[dict[str, Any]]:
    """What `train` gives for all jobs, in their order: read from `folder` if there is one and it has it, else trained
    and kept there."""
    kept = {job: job.kept(folder) for job in jobs}
    found = {job: result for job, (results, name) in kept.items() if (result := results.read(name)) is not None}
    missing = [job for job in jobs if job not in found]
    if folder:
        log.info("%d of %d trainings are in %s already", len(found), len(jobs), folder)
    idle: SimpleQueue[Worker] = SimpleQueue()

    def one(job: _Job) -> dict[str, Any]:
        worker = idle.get()
        try:
            task, rest = job.task, {"way": job.way, "seed": job.seed, "may_halt": job.may_halt}
            result: dict[str, Any] = worker.ask(recipe=str(task.recipe), settings=task.settings, **rest)
        finally:
            idle.put(worker)
        log.info("%s: area %.2f in %.0f s%s", job.label, fmean(result["returns"]), result["seconds"], result["halted"])
        results, name = kept[job]
        results.write(name, result)
        return result

    # The pool is left last: when something goes wrong, ending the workers is what ends its threads.
    count = min(len(missing), psutil.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, count)) as pool, ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(Worker(f"{__name__}:trainer")))
        found |= dict(zip(missing, pool.map(one, missing), strict=True))
    return [found[job] for job in jobs]


@contextmanager
def trainer() -> Iterator[Answer]:
    """Trains one run when it is asked; see `train`."""

    def answer(
        recipe: str, settings: Sequence[str], way: Sequence[str], seed: int, *, may_halt: bool
    ) -> dict[str, Any]:
        return train(TrainingTask(recipe, tuple(settings), 1).config(way, seed), may_halt=may_halt)

    yield answer


def train(config: RunConfig, *, may_halt: bool = False) -> dict[str, Any]:
    """One whole run: returns and successes by ticket, lag_mean of the samples trained on, seconds that it took after
    its warm start, and why it halted ("" if it did not). The episodes that a halted run has not had count as 0.

    RunHalted: it halted and may not, or it broke its promise of freshness.
    """
    checked = validate_run(config)
    training, lags, halted = EpisodeOutcomes(), LagHistogram(), ""
    with ExitStack() as stack:
        initial, folder = None, Path(stack.enter_context(TemporaryDirectory(prefix="polyrhythm-")))
        if config.demonstrations is not None:
            imitate(checked, folder, None)
            initial = folder / POLICY_FILE
        logs = None if config.launcher == "inline" else folder
        pipeline = stack.enter_context(closing(build_pipeline(RunContext(checked.config, initial, logs))))
        pipeline.loop.add_observers(training, lags)
        began = time.monotonic()
        try:
            pipeline.loop.train_until(config.training.versions)
        except RunHalted as error:
            if not may_halt:
                raise
            halted = str(error)
        seconds = time.monotonic() - began
    lags.check_bound(math.ceil(config.freshness.max_lag), config.freshness.bound, clean=True)
    ended = training.in_order
    wanted = config.training.versions * config.freshness.sync_interval * config.training.batch_size
    assert halted or len(ended) == wanted, f"{len(ended)} episodes for {wanted} samples"
    missing = [0.0] * (wanted - len(ended))
    return {
        "returns": [episode.episode_return for episode in ended[:wanted]] + missing,
        "successes": [float(episode.success) for episode in ended[:wanted]] + missing,
        "lag_mean": lags.summary()["mean"],
        "seconds": seconds,
        "halted": halted,
    }
