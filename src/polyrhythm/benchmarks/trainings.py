"""Whole trainings for their learning curves: a process and a core for each, as many at a time as there are cores.

The launcher is inline: what is compared is learning, not time. Rollout and training still alternate at the grain of one
forward pass and one optimizer step, so the lags are near α, which is measured.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, NamedTuple

import psutil

from polyrhythm.benchmarks.curves import Training
from polyrhythm.benchmarks.worker import Answer, Worker
from polyrhythm.config.load import load_config
from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.check import check
from polyrhythm.pipeline.observers import Lags

log = logging.getLogger(__name__)


class Job(NamedTuple):
    """A training: what it is called in the log, its recipe, and settings over it. may_halt: a run that halts counts
    with what it had, instead of ending everything."""

    label: str
    recipe: str | Path
    settings: tuple[str, ...]
    may_halt: bool = False

    @property
    def config(self) -> RunConfig:
        return load_config(self.recipe, [*self.settings, "launcher=inline"])


def train_all(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What `train` gives for all jobs, in their order."""
    count = min(len(jobs), psutil.cpu_count() or 1)
    idle: SimpleQueue[Worker] = SimpleQueue()

    def one(job: Job) -> dict[str, Any]:
        worker = idle.get()
        try:
            found: dict[str, Any] = worker.ask(recipe=str(job.recipe), settings=job.settings, may_halt=job.may_halt)
        finally:
            idle.put(worker)
        log.info("%s: area %.2f in %.0f s%s", job.label, fmean(found["returns"]), found["seconds"], found["halted"])
        return found

    # The pool is left last: when something goes wrong, ending the workers is what ends its threads.
    with ThreadPoolExecutor(count) as pool, ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(Worker(f"{__name__}:trainer")))
        return list(pool.map(one, jobs))


@contextmanager
def trainer() -> Iterator[Answer]:
    """Trains one run when it is asked; see `train`."""

    def answer(recipe: str, settings: Sequence[str], may_halt: bool) -> dict[str, Any]:
        return train(Job("", recipe, tuple(settings)).config, may_halt=may_halt)

    yield answer


def train(config: RunConfig, *, may_halt: bool = False) -> dict[str, Any]:
    """One whole run: returns and successes by ticket, lag_mean of the samples trained on, seconds that it took, and why
    it halted ("" if it did not). The episodes that a halted run has not had count as 0.

    RunHalted: it halted and may not, or it broke its promise of freshness.
    """
    checked = check(config)
    training, lags, halted = Training(), Lags(), ""
    with closing(build_pipeline(checked.config, checked.policy)) as pipeline:
        pipeline.loop.observers += [training, lags]
        began = time.monotonic()
        try:
            pipeline.loop.train_until(config.training.versions)
        except RunHalted as error:
            if not may_halt:
                raise
            halted = str(error)
        seconds = time.monotonic() - began
    lags.refuse_beyond(math.ceil(config.freshness.max_lag), config.freshness.bound, clean=True)
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
