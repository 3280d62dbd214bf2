"""Checks before anything starts that an update can be dealt to the trainer's ranks.

Groups of a mini-batch are dealt to ranks whole, and each rank takes the steps of its own groups
(docs/design/training-and-objectives.md). With fewer groups or steps than ranks, some ranks would only wait.
"""

from __future__ import annotations

from polyrhythm.config.schema import RunConfig
from polyrhythm.errors import ConfigError


def check_ranks(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError, with a problem for each setting, unless the mini-batches of this run fit so many ranks.
    ranks: of this machine (`pipeline.placed.trainer_ranks`)."""
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
            f"trains whole {'groups' if size > 1 else 'samples'}; use at most {_counted(samples // size)}, or "
            f"a training.mini_batch_samples of {ranks * size} or more"
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


def _named(config: RunConfig, ranks: int) -> str:
    """The setting that the number of ranks comes from, with its value."""
    placement = config.placement
    if placement.trainer.ranks is not None:
        return f"placement.trainer.ranks = {ranks}"
    if placement.trainer.devices is not None:
        return f"placement.trainer.devices = {placement.trainer.devices} ({ranks} ranks)"
    return f"placement.preset = {placement.preset} ({ranks} ranks of the trainer)"
