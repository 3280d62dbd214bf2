"""verl's ablation of `require_batches`, on the recipe `quickstart_lm`: updates of 1, 2 and 4 mini-batches.

A mini-batch has 64 messages and is one optimizer step; a version has 256 in every way, so samples and optimizer steps
are equal and `sync_interval` is 4, 2 and 1. What differs: how many samples an update waits for, and over how many its
targets and its proximal policy are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from polyrhythm.config.load import load_config
from polyrhythm_bench.harness import trainings

log = logging.getLogger(__name__)

BATCHES = (1, 2, 4)
MINI_BATCH, VERSION = 64, 256


def run(versions: int = 60, seeds: int = 3) -> dict[str, Any]:
    """Every way with seeds 0..seeds-1, in turns, each run in the recipe's processes; what `summarise` returns."""
    runs: dict[int, list[Mapping[str, Any]]] = {batches: [] for batches in BATCHES}
    for seed in range(seeds):
        for batches, found in runs.items():
            config = load_config("quickstart_lm", [*way(batches, versions), f"seed={seed}"])
            found.append(trainings.train(config))
            log.info("seed %d, require_batches %d: %.0f s", seed, batches, found[-1]["seconds"])
    return {"recipe": "quickstart_lm", "versions": versions, "seeds": seeds, "ways": summarise(runs, versions)}


def way(batches: int, versions: int) -> tuple[str, ...]:
    """The settings of an update of so many mini-batches."""
    return (
        f"training.mini_batch_samples={MINI_BATCH}",
        f"training.require_batches={batches}",
        f"freshness.sync_interval={VERSION // (MINI_BATCH * batches)}",
        "training.minibatch_steps=0",
        f"training.versions={versions}",
        "evaluation.episodes=0",
    )


def summarise(runs: Mapping[int, Sequence[Mapping[str, Any]]], versions: int) -> list[dict[str, Any]]:
    """For each number of mini-batches: success over all messages and over the last tenth (means over seeds; each
    seed's last), seconds a version (median), and the mean lag."""
    return [
        {
            "require_batches": batches,
            "sync_interval": VERSION // (MINI_BATCH * batches),
            "success": fmean(fmean(one["successes"]) for one in own),
            "last": fmean(last := [fmean(one["successes"][-len(one["successes"]) // 10 :]) for one in own]),
            "last_by_seed": last,
            "seconds_per_version": median(one["seconds"] for one in own) / versions,
            "lag_mean": fmean(one["lag_mean"] for one in own),
        }
        for batches, own in runs.items()
    ]
