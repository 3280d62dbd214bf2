"""Shards the env batches of a run into slots, the groups of rows that request actions together."""

from __future__ import annotations

from dataclasses import replace

from polyrhythm.config.schema import RunConfig
from polyrhythm.conformance import raised
from polyrhythm.envs.base import traits_of
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import EVALUATION_SIMULATOR, generator_names, joined_names
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.scheduler.rollout.rows import StrategyFailure, shard
from polyrhythm.specs import EnvSpec


def env_batch_infos(config: RunConfig, spec: EnvSpec, *, trainer: bool = True) -> list[list[EnvBatchInfo]]:
    """Env batches of each simulator, sharded into slots; with a trainer, rows reserved for evaluation come last.

    ConfigError: `rollout.sharding` fails, or the environment cannot be reset ahead.
    """
    rollout = config.rollout
    try:
        infos = [
            [
                shard(
                    f"simulator-{simulator}.{batch}",
                    rollout.rows,
                    rollout.sharding,
                    generator_names(config),
                    reset_rows=spec.reset_rows,
                )
                for batch in range(rollout.env_batches)
            ]
            for simulator in range(rollout.simulators)
        ]
    except StrategyFailure as error:
        cause = error.__cause__ or error
        raise ConfigError(f"rollout.sharding = {rollout.sharding}: it {raised(cause)}; fix it there") from error
    except ValueError as error:
        raise ConfigError(f"rollout.sharding = {rollout.sharding}: {error}") from error
    if rollout.reset_ahead:
        _check_reset_ahead(config, spec)
        infos = [[replace(info, spares=rollout.reset_ahead) for info in own] for own in infos]
    rows = config.join.rows or rollout.rows
    infos += [[shard(f"{name}.0", rows, "whole", [], reset_rows=spec.reset_rows)] for name in joined_names(config)]
    if any(len(info.slots) > 1 for own in infos for info in own):
        _check_join(config, spec)
    if trainer and (rows := config.evaluation.reserved_rows):
        own = shard(f"{EVALUATION_SIMULATOR}.0", rows, "whole", [], reset_rows=spec.reset_rows)
        infos.append([replace(own, reserved=True)])
    return infos


def _check_reset_ahead(config: RunConfig, spec: EnvSpec) -> None:
    """ConfigError: the environment cannot reset a row in another thread while other rows step."""
    prefix = f"rollout.reset_ahead = {config.rollout.reset_ahead}: "
    if not (spec.step_rows and spec.reset_rows):
        raise ConfigError(f"{prefix}the environment steps or resets only whole batches; set it to 0")
    traits = traits_of(config.env)
    if traits.own_process:
        raise ConfigError(f"{prefix}an environment with env.python does one thing at a time; set it to 0")
    if traits.leaves_device:
        raise ConfigError(f"{prefix}the environment leaves its device for others, and spare rows cannot; set it to 0")
    if not traits.resets_ahead:
        raise ConfigError(
            f"{prefix}the environment does not say that a row may reset in another thread while others step; set it to "
            "0, or declare the trait resets_ahead in its settings if they may (docs/own-environments.md)"
        )


def _check_join(config: RunConfig, spec: EnvSpec) -> None:
    """ConfigError: `rollout.join` does not work with an env batch of several slots."""
    rollout = config.rollout
    if rollout.join == "none" and not spec.step_rows:
        raise ConfigError(
            "rollout.join = none: the environment steps only whole batches; set rollout.join to all, or "
            "rollout.sharding to whole"
        )
    if (rollout.join == "all" or not spec.step_rows) and config.batching.type == "lockstep":
        raise ConfigError(
            f"rollout.sharding = {rollout.sharding}: the slots of an env batch step together, so under lockstep they "
            "could wait for each other for ever; set rollout.sharding to whole, or batching.type to dynamic"
        )
