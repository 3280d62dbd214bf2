"""A trainer of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyrhythm.checks import Check, CheckContext, Result
from polyrhythm.conformance import Finding
from polyrhythm.errors import ConfigError
from polyrhythm.plugin import Plugin
from polyrhythm.readable import counted

if TYPE_CHECKING:
    from polyrhythm.config.schema import RunConfig
    from polyrhythm.config.sections.placement import ShardSettings, TrainerSeatSettings


def _ranks(context: CheckContext) -> Result:
    from polyrhythm.pipeline.placed import trainer_ranks

    config = context.config
    if not (context.trainer and config.training.versions):
        return ()
    ranks = trainer_ranks(config)
    check_ranks(config, ranks)
    if ranks == 1 or config.launcher != "ray" or config.ray.address == "local":
        return ()
    return Finding("ranks", "note", f"{ranks} ranks may be on several nodes: {_OPEN}")


#: What a run whose ranks are on several hosts tells.
_OPEN = (
    "what they send each other (gradients, weights) is neither authenticated nor encrypted, so their network has to be "
    "your own; each of their nodes has to see the run's folder"
)


def hosts_of_replicas(hosts: Sequence[str], settings: ShardSettings) -> list[list[int]]:
    """The ranks of each host that has all weights; none if the hosts differ in their number of ranks or have one each,
    or if all ranks share the weights by these settings. hosts: of each rank.

    Example: (a, b, a, b) → [[0, 2], [1, 3]]; (a, a, b) and (a, b) → [].
    """
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    count = max(map(len, found.values()), default=0)
    equal = all(len(ranks) == count for ranks in found.values())
    several = count > 1 and len(found) > 1
    return list(found.values()) if equal and several and settings.within == "node" else []


def count_shards(settings: TrainerSeatSettings, nodes: Sequence[str]) -> int:
    """How many ranks share each of the trainer's tensors. nodes: of each rank, "" where it is not known: one node."""
    if settings.strategy != "shard":
        return 1
    replicas = hosts_of_replicas(nodes, settings.shard)
    return len(replicas[0]) if replicas else max(1, len(nodes))


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
