"""Measuring a trained policy: the stations of a run, without training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from polyrhythm.errors import RunFolderError, RunHalted
from polyrhythm.pipeline.build import build_pipeline
from polyrhythm.pipeline.check import check, refuse_swapping
from polyrhythm.pipeline.checkpoints import load_policy
from polyrhythm.pipeline.episodes import held_out, tally
from polyrhythm.pipeline.live import Live
from polyrhythm.policies.base import as_module
from polyrhythm.runtime.tensors import apply_state

#: Episodes where neither the caller nor the run's own configuration names a number.
EPISODES = 128


def evaluate(
    path: Path,
    episodes: int | None = None,
    seed: int | None = None,
    greedy: bool = True,
    swap_instructions: bool = False,
    live: Live | None = None,
) -> dict[str, Any]:
    """Success rate with its Wilson 95% interval, and the mean return, of the policy in a run folder or checkpoint.

    episodes: dealt over the tasks, their initial states a function of `seed`, never seen in training; both as in the
    run's own evaluation unless given, so that a finished run's `after` comes out again.
    swap_instructions: show every task the next one's sentence; a policy that listens then fails.
    live: shows a person how it goes. Raises RunFolderError if there is no such policy.
    """
    config, weights, version = load_policy(path)
    _, spec, policy = check(config, trainer=False)
    if swap_instructions:
        refuse_swapping(spec)
    episodes = episodes or config.evaluation.episodes or EPISODES
    seed = config.evaluation.seed if seed is None else seed
    try:
        apply_state(as_module(policy), weights)
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; these weights belong to other settings, name another folder") from error
    wanted = held_out(episodes, seed, len(spec.tasks), greedy=greedy, swap=swap_instructions)
    if live:
        live.phase("evaluation", time.monotonic())
    with _logs() as folder, closing(build_pipeline(config, policy, folder, trainer=False)) as pipeline:
        if live:
            live.watch(pipeline)
        results = pipeline.evaluate("evaluation", wanted)
    return {**tally(results, spec.tasks), "greedy": greedy, "seed": seed, "version": version}


@contextmanager
def _logs() -> Iterator[Path]:
    """A folder for the stations' logs, which stays only where the error that ends it names one of them."""
    folder, named = Path(mkdtemp(prefix="polyrhythm-")), False
    try:
        yield folder
    except RunHalted as error:
        named = str(folder) in str(error)
        raise
    finally:
        if not named:
            rmtree(folder)
