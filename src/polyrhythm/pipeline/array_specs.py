"""Computes a run's env batches, sharded into slots, the specs of the arrays that stations exchange, and the arena's
layout. Slots are groups of rows that request actions together. No policy is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.conformance import raised
from polyrhythm.envs.base import traits_of
from polyrhythm.errors import ConfigError
from polyrhythm.pipeline.placed import EVALUATION_SIMULATOR, generator_names, joined_names
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import blocks_needed
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE
from polyrhythm.scheduler.inference.batching import powers
from polyrhythm.scheduler.records import EnvBatchInfo
from polyrhythm.scheduler.rollout.rows import StrategyFailure, shard
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec
from polyrhythm.stations.simulator.slot import StepSettings


def arena_layout(
    config: RunConfig,
    spec: EnvSpec,
    infos: Sequence[Sequence[EnvBatchInfo]],
    form: PolicyForm,
    *,
    trainer: bool = True,
) -> ArenaLayout:
    """Returns the arena's layout; without a trainer it has no blocks for waiting samples.

    Redundant tickets need extra blocks: spare samples are stored in addition to the admitted ones.
    """
    slots = {slot.slot: slot.rows for batches in infos for info in batches for slot in info.slots}
    rows = sum(slots.values())
    freshness = config.freshness
    version_samples = config.training.batch_size * freshness.sync_interval
    groups, scoring = config.groups, config.scoring
    # Samples that scorers still read after their release elsewhere, and scored evaluations.
    scored = 0 if scoring is None else scoring.processes * scoring.at_a_time + scored_evaluations(rows)
    needed = blocks_needed(
        rows,
        version_samples,
        freshness.max_lag,
        group_size=groups.size,
        extra_groups=groups.extra_groups,
        extra_members=groups.extra_members,
        scored=scored,
    )
    blocks = needed if trainer else rows + scored
    return ArenaLayout(
        blocks=blocks,
        steps=step_settings(config, form.chunk, whole=bool(spec.chunk)).sample_steps(spec.max_steps),
        chunk=form.chunk,
        obs=shown(spec),
        answers=answer_specs(form, spec),
        slots=slots,
        scored=scored > 0,
        streamed=isinstance(config.batching, StreamsBatching),
    )


def scored_evaluations(rows: int) -> int:
    """Maximum number of evaluation samples that run or wait for a score: twice the rows, since finished ones wait
    too."""
    return 2 * rows


def shown(spec: EnvSpec) -> dict[str, ArraySpec]:
    """Specs of a policy's inputs: the environment's observation, the instruction index and the progress (0..1)."""
    return {**spec.observation, INSTRUCTION: ArraySpec((), "int64"), PROGRESS: ArraySpec((), "float32")}


def blank(spec: EnvSpec) -> dict[str, torch.Tensor]:
    """Policy input of one row of zeros, for checks of a policy."""
    return {name: torch.from_numpy(np.zeros((1, *a.shape), a.dtype)) for name, a in shown(spec).items()}


def answer_specs(form: PolicyForm, spec: EnvSpec) -> dict[str, ArraySpec]:
    """Specs of one row's answer, by the array names of `runtime.messages`."""
    shape = (form.chunk, form.action_dim)
    fixed = {
        ACTIONS: ArraySpec(shape, spec.action.dtype),
        LOGPROB: ArraySpec(shape, "float32"),
        VALUE: ArraySpec((form.chunk,) if form.value == "action" else (), "float32"),
    }
    return fixed | {FORWARD_INPUTS + name: array for name, array in form.answers.items()}


def step_settings(config: RunConfig, chunk: int, *, whole: bool = False) -> StepSettings:
    """Settings of a slot's chunk steps. whole: the environment steps a whole chunk at a time."""
    rollout = config.rollout
    join = rollout.join == "all"
    return StepSettings(chunk, rollout.action_repeat, rollout.segment_steps, join, whole)


def bucket_sizes(
    config: RunConfig, infos: Sequence[Sequence[EnvBatchInfo]], *, on_device: bool = False
) -> tuple[int, ...]:
    """Row counts that forward passes are padded to, ascending; empty without padding.

    on_device: generators are on CUDA devices. ConfigError: a batch may be larger than the largest bucket.
    """
    buckets = config.rollout.buckets
    if buckets == "auto":
        passes = not isinstance(config.batching, StreamsBatching)
        buckets = "powers" if on_device and passes and config.rollout.graphs == "auto" else "none"
    if buckets == "none":
        return ()
    most = largest_batch(config, infos)
    if isinstance(buckets, str):
        return powers(most)
    if buckets[-1] < most:
        raise ConfigError(
            f"rollout.buckets = {list(buckets)}: a batch may have {most} rows, more than the largest bucket; add "
            f"{powers(most)[-1]}, or use powers"
        )
    return buckets


def largest_batch(config: RunConfig, infos: Sequence[Sequence[EnvBatchInfo]]) -> int:
    """Maximum number of rows of one forward pass."""
    batches = [info for own in infos for info in own]
    slots = [slot.rows for info in batches for slot in info.slots]
    reserved = sum(slot.rows for info in batches if info.reserved for slot in info.slots)
    training = sum(slots) - reserved  # evaluation rows have separate passes
    if isinstance(config.batching, LimitedBatching | StreamsBatching):
        training = min(config.batching.max_rows, training)
    if isinstance(config.batching, LimitedBatching):
        training = min(config.batching.max_requests * max(slots), training)
    return max(training, reserved, *slots)


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
