"""How many rows the largest passes of a run have, by its settings."""

from __future__ import annotations

import math

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.pipeline.array_specs import bucket_sizes, largest_batch, step_settings
from polyrhythm.pipeline.env_batches import env_batch_infos
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec


def pass_rows(config: RunConfig, spec: EnvSpec, *, on_device: bool = False) -> int:
    """Rows of a generator's largest forward pass, padding included. on_device: generators are on CUDA devices."""
    infos = env_batch_infos(config, spec)
    if buckets := bucket_sizes(config, infos, on_device=on_device):
        return buckets[-1]
    most = largest_batch(config, infos)
    if not isinstance(config.batching, LimitedBatching):
        return most
    largest = max(slot.rows for own in infos for info in own for slot in info.slots)
    return max(largest, min(most, largest * config.batching.max_requests))


def stream_places(config: RunConfig, spec: EnvSpec) -> int:
    """Rows for which the engine of a streaming generator has keys and values; 0 where generators do not stream."""
    if not isinstance(config.batching, StreamsBatching):
        return 0
    slots = (slot.rows for own in env_batch_infos(config, spec) for info in own for slot in info.slots)
    return max(config.batching.max_rows, *slots)


def micro_batch_rows(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> int:
    """Chunk steps of the largest forward and backward pass of a rank. steps: of the longest sample; row_tokens: of the
    longest chunk step, of which `micro_batch_tokens` allows only so many."""
    most, training = _minibatch_rows(config, steps, ranks), config.training
    if training.micro_batch_tokens and row_tokens:
        most = min(most, -(-training.micro_batch_tokens // row_tokens))
    return min(most, training.micro_batch_steps) if training.micro_batch_steps else most


def accumulates(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> bool:
    """Whether a rank has several micro-batches in a mini-batch, whose gradients it adds."""
    rows, training = _minibatch_rows(config, steps, ranks), config.training
    by_tokens = training.micro_batch_tokens and rows * row_tokens > training.micro_batch_tokens
    return bool(by_tokens) or 0 < training.micro_batch_steps < rows


def _minibatch_rows(config: RunConfig, steps: int, ranks: int) -> int:
    """Most chunk steps of a mini-batch that one rank has. It is dealt to ranks by groups, so the fullest has about
    √(n/R) more than its share (docs/design/training-and-objectives.md)."""
    mini = config.training.mini_batch_samples * steps
    if config.training.minibatch_steps:
        mini = min(mini, config.training.minibatch_steps)
    return min(mini, math.ceil(mini / ranks + math.sqrt(mini / ranks))) if ranks > 1 else mini


def update_rows(config: RunConfig, steps: int) -> int:
    """Chunk steps of an update whose samples are all as long as the longest."""
    return config.training.batch_size * steps


def longest_sample(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> int:
    """Chunk steps of the longest sample."""
    return step_settings(config, form.chunk, whole=bool(spec.chunk)).sample_steps(spec.max_steps)
