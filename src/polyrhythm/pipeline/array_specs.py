"""Computes the specs of the arrays that stations exchange, and the arena's layout, from the configuration, the
environment's spec and the policy's form. No policy is built."""

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
    """Returns the arena's layout; without a trainer it has no blocks for waiting samples.

    Redundant tickets need extra blocks: spare samples are stored in addition to the admitted ones.
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
    """Maximum number of evaluation samples that run or wait for a score: twice the rows, since finished ones wait
    too."""
    return 2 * rows


def _scored_samples(config: RunConfig, rows: int) -> int:
    """Blocks for samples that scorers still read after their release elsewhere, and for scored evaluations."""
    scoring = config.scoring
    return 0 if scoring is None else scoring.processes * scoring.at_a_time + scored_evaluations(rows)


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
    return max(training, reserved, *slots)
