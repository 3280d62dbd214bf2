"""Computes the specs of the arrays that stations exchange: observations, policy answers, and the arena for both.

They follow from the configuration, the environment's spec and the policy's form; no policy is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.errors import ConfigError
from polyrhythm.policies.form import PolicyForm
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.in_flight import blocks_needed
from polyrhythm.runtime.messages import ACTIONS, FORWARD_INPUTS, LOGPROB, VALUE
from polyrhythm.scheduler.inference.batching import powers
from polyrhythm.scheduler.records import EnvBatchInfo
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
    """The layout of the arena; without a trainer it has no blocks for waiting samples.

    Redundant tickets need extra blocks: samples of spare groups wait besides those that admission counts.
    """
    slots = {slot.slot: slot.rows for batches in infos for info in batches for slot in info.slots}
    rows = sum(slots.values())
    freshness = config.freshness
    version_samples = config.training.batch_size * freshness.sync_interval
    groups, scored = config.groups, _scored_samples(config, rows)
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
    """Samples of evaluations that run or wait for their scores at a time: as many as rows again may wait."""
    return 2 * rows


def _scored_samples(config: RunConfig, rows: int) -> int:
    """Blocks that scorers need: for what they read although nobody waits for it any more, and for evaluations."""
    scoring = config.scoring
    return 0 if scoring is None else scoring.processes * scoring.at_a_time + scored_evaluations(rows)


def shown(spec: EnvSpec) -> dict[str, ArraySpec]:
    """The inputs of a policy: the environment's observation, and the arrays that the simulator station adds."""
    return {**spec.observation, INSTRUCTION: ArraySpec((), "int64"), PROGRESS: ArraySpec((), "float32")}


def blank(spec: EnvSpec) -> dict[str, torch.Tensor]:
    """One row of zeros as input, for checking a policy."""
    return {name: torch.from_numpy(np.zeros((1, *a.shape), a.dtype)) for name, a in shown(spec).items()}


def answer_specs(form: PolicyForm, spec: EnvSpec) -> dict[str, ArraySpec]:
    """The arrays of one row's answer, by the names of `runtime.messages`."""
    shape = (form.chunk, form.action_dim)
    fixed = {
        ACTIONS: ArraySpec(shape, spec.action.dtype),
        LOGPROB: ArraySpec(shape, "float32"),
        VALUE: ArraySpec((form.chunk,) if form.value == "action" else (), "float32"),
    }
    return fixed | {FORWARD_INPUTS + name: array for name, array in form.answers.items()}


def step_settings(config: RunConfig, chunk: int, *, whole: bool = False) -> StepSettings:
    """How slots do chunk steps. whole: an env step takes a chunk."""
    rollout = config.rollout
    join = rollout.join == "all"
    return StepSettings(chunk, rollout.action_repeat, rollout.segment_steps, join, whole)


def bucket_sizes(
    config: RunConfig, infos: Sequence[Sequence[EnvBatchInfo]], *, on_device: bool = False
) -> tuple[int, ...]:
    """The row counts that forward passes are padded to, ascending; empty without padding. on_device: generators are on
    CUDA devices.

    ConfigError: a batch may be larger than the largest bucket.
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
    """The most rows that one forward pass may have, by `max_rows` and the sizes of the slots."""
    batches = [info for own in infos for info in own]
    slots = [slot.rows for info in batches for slot in info.slots]
    reserved = sum(slot.rows for info in batches if info.reserved for slot in info.slots)
    training = sum(slots) - reserved  # evaluation rows have separate passes
    if isinstance(config.batching, LimitedBatching | StreamsBatching):
        training = min(config.batching.max_rows, training)
    return max(training, reserved, *slots)
