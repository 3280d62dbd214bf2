"""A trainer of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyrhythm.checks import Check, CheckContext
from polyrhythm.errors import ConfigError
from polyrhythm.plugin import Plugin
from polyrhythm.readable import counted

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig


def _ranks(context: CheckContext) -> tuple[()]:
    from polyrhythm.pipeline.placed import trainer_ranks

    if context.trainer and context.config.training.versions:
        check_ranks(context.config, trainer_ranks(context.config))
    return ()


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError, with a problem for each setting, unless the mini-batches of this run fit this number of ranks.

    Groups are dealt to ranks whole, and each rank trains on its own steps; with fewer groups or steps some ranks would
    idle. ranks: of this machine (`pipeline.placed.trainer_ranks`).
    """
    if ranks == 1:
        return
    what, training = _named(config, ranks), config.training
    problems = []
    if config.launcher == "inline":
        problems.append(
            f"{what}: with launcher = inline there is one process, and so one rank; set launcher to local, or "
            "placement.trainer.ranks to 1"
        )
    size, samples = config.groups.size, training.mini_batch_samples
    if samples // size < ranks:
        those = f"{samples // size} groups of {size} samples" if size > 1 else f"{samples} samples"
        problems.append(
            f"{what}: training.mini_batch_samples = {samples} are {those}, and a rank "
            f"trains whole {'groups' if size > 1 else 'samples'}; use at most {counted(samples // size, 'rank')}, or "
            f"a training.mini_batch_samples of {ranks * size} or more"
        )
    if 0 < training.minibatch_steps < ranks:
        problems.append(
            f"{what}: training.minibatch_steps = {training.minibatch_steps} is fewer than one chunk step for each "
            f"rank; use at most {counted(training.minibatch_steps, 'rank')}, or a minibatch_steps of {ranks} or more "
            "(0: all)"
        )
    if problems:
        raise ConfigError(*problems)


def _named(config: RunConfig, ranks: int) -> str:
    placement = config.placement
    if placement.trainer.ranks is not None:
        return f"placement.trainer.ranks = {ranks}"
    if placement.trainer.devices is not None:
        return f"placement.trainer.devices = {placement.trainer.devices} ({ranks} ranks)"
    return f"placement.preset = {placement.preset} ({ranks} ranks of the trainer)"


CHECKS = (Check("ranks", "recipe", "settings", _ranks, after="devices"),)
PLUGIN = Plugin(
    "ranks",
    adds={
        "check": {"ranks": f"{__name__}:CHECKS"},
        "ranks": {
            "replicate": "polyrhythm.plugins.ranks.replicated:ReplicatedRanks",
            "shard": "polyrhythm.plugins.ranks.sharded:ShardedRanks",
        },
        "checkpoint": {
            "folder": "polyrhythm.plugins.ranks.shards:load_folder",
        },
    },
)
