"""Checks before anything starts that an update can be dealt to the trainer's ranks.

Whole groups are dealt to ranks, and each rank takes the steps of a mini-batch that are of its own groups
(docs/design/031-ranks.md). With fewer groups or steps than ranks, some ranks would only wait.
"""

from __future__ import annotations

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError, with a problem for each setting, unless an update of this run fits so many ranks. ranks: of
    this machine (`pipeline.placed.trainer_ranks`)."""
    if ranks == 1:
        return
    what, training = _named(config, ranks), config.training
    problems = []
    if config.launcher == "inline":
        problems.append(
            f"{what}: with launcher = inline there is one process, and so one rank; set launcher to local, or "
            "placement.trainer.ranks to 1"
        )
    size, batch = config.groups.size, training.batch_size
    if batch // size < ranks:
        those = f"{batch // size} groups of {size} samples" if size > 1 else f"{batch} samples"
        problems.append(
            f"{what}: an update has {those} (training.mini_batch_samples x require_batches = {batch}), and a rank "
            f"trains whole {'groups' if size > 1 else 'samples'}; use at most {_counted(batch // size)}, or "
            f"a training.mini_batch_samples of {_enough(ranks * size, training.require_batches, size)} or more"
        )
    if 0 < training.minibatch_steps < ranks:
        problems.append(
            f"{what}: training.minibatch_steps = {training.minibatch_steps} is fewer than one chunk step for each "
            f"rank; use at most {_counted(training.minibatch_steps)}, or a minibatch_steps of {ranks} or more (0: all)"
        )
    if problems:
        raise ConfigError(*problems)


def _counted(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _enough(samples: int, batches: int, size: int) -> int:
    """The least mini_batch_samples with which so many samples are in an update, whole groups in all."""
    found = -(-samples // batches)
    while found * batches % size:
        found += 1
    return found


def _named(config: RunConfig, ranks: int) -> str:
    """The setting that the number of ranks comes from, with its value."""
    placement = config.placement
    if placement.trainer.ranks is not None:
        return f"placement.trainer.ranks = {ranks}"
    if placement.trainer.devices is not None:
        return f"placement.trainer.devices = {placement.trainer.devices} ({ranks} ranks)"
    return f"placement.preset = {placement.preset} ({ranks} ranks of the trainer)"
