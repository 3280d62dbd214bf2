"""Memory of every station of a run, by device: pure arithmetic on declared forms.

Parts are *certain* if they follow from shapes (weights, gradients, moments, published tensors, the arena); others are
estimated (passes, batches, samples at maximum length).

Invariant: the parts of a device add up to the bytes that its stations hold at the same time, each byte once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.config.sections.rollout import LimitedBatching, StreamsBatching
from polyrhythm.pipeline.array_specs import (
    answer_specs,
    arena_layout,
    bucket_sizes,
    env_batch_infos,
    largest_batch,
    shown,
    step_settings,
)
from polyrhythm.pipeline.placed import TRAINER, Placed, evaluator_name, generator_names, place
from polyrhythm.plugins.memory_estimate.activations import Activations
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.memory.arena import ArenaLayout
from polyrhythm.runtime.memory.published import keeps_copy, shared_nbytes
from polyrhythm.runtime.memory.receiver import CHUNK_BYTES
from polyrhythm.specs import ArraySpec, EnvSpec, WeightsLayout
from polyrhythm.training.optim import PIECE_BYTES

Sharing = Literal["share", "lease"]

#: AdamW keeps two moments per trained number.
_MOMENTS = 2
#: Station that stands for what all processes of the host share.
SHARED = "shared"
HOST = "cpu"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Bytes of one station for one purpose. device: `cpu`, the host's memory, or `cuda:N`.

    certain: follows from shapes. stays: kept between units of work, so a station that yields its device moves it.
    """

    station: str
    purpose: str
    device: str
    nbytes: int
    certain: bool = True
    stays: bool = True


def memory_by_station(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> dict[str, dict[str, int]]:
    """The certain bytes by station and purpose on any device, with a trainer of one rank; `shared` is the host's shared
    memory.

    simulators: the arena blocks that their rows write at a time, part of the arena.
    """
    infos = env_batch_infos(config, spec)
    asked = config.placement.generators.devices
    on_device = asked != HOST and (asked is not None or config.placement.preset is not None)
    placement = PlacementSettings.model_validate({"generators": {"devices": "0" if on_device else HOST}})
    placed = place(config.model_copy(update={"placement": placement}), devices=1)
    parts = list_parts(config, spec, form, placed)
    arena = arena_layout(config, spec, infos, form)
    found: dict[str, dict[str, int]] = {SHARED: {}}
    for batches in infos:
        rows = sum(slot.rows for info in batches for slot in info.slots)
        found[batches[0].name.rpartition(".")[0]] = {"arena blocks": rows * (arena.nbytes // arena.blocks)}
    for part in parts:
        offloaded = part.purpose == "optimizer" and config.training.optimizer.offload
        name = part.purpose + " (host)" * offloaded
        found.setdefault(part.station, {})[name] = part.nbytes
    return found


def list_parts(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, placed: Placed, *, activations: Activations | None = None
) -> list[MemoryPart]:
    """All parts of the stations. activations: None omits estimated parts."""
    trains = bool(placed.names["trainer"])
    infos = env_batch_infos(config, spec, trainer=trains)
    layout = arena_layout(config, spec, infos, form, trainer=trains)
    published = WeightsLayout.of(form.published)
    inline = trains and config.launcher == "inline" and placed.lease is None  # versions stay on the trainer's device
    parts = [
        MemoryPart(SHARED, "arena", HOST, layout.nbytes),
        MemoryPart(SHARED, "published weights", placed.ends.trainer if inline else HOST, shared_nbytes(published)),
    ]
    for name in placed.names["generators"]:
        device = placed.seats[name].device
        parts += _generator(config, spec, form, name, device, published.nbytes)
        if activations is not None:
            rows = pass_rows(config, spec, on_device=device != HOST)
            parts += _passes(config, spec, form, name, device, rows, activations)
    parts += _trainer(config, spec, form, placed, layout, activations)
    return [part for part in parts if part.nbytes]


# ---------------------------------------------------------------- generators


def _generator(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, name: str, device: str, published: int
) -> list[MemoryPart]:
    """A generator's memory: its policy, the evaluation's, on a device a version in transfer, and with streaming the
    keys and values of all running rows, or the memory of another engine."""
    both = name == evaluator_name(config) and name in generator_names(config)
    stages = device != HOST and name in generator_names(config)
    places = stream_places(config, spec)
    engine = {"keys and values": form.row_cache * places}
    if form.engine is not None:
        engine = dict(form.engine) if places else {}
    return [
        MemoryPart(name, "weights", device, form.act_bytes),
        MemoryPart(name, "weights of the evaluation", device, form.act_bytes * both),
        MemoryPart(name, "staging", device, published * stages, stays=False),
        *(MemoryPart(name, purpose, device, kept * (1 + both), stays=False) for purpose, kept in engine.items()),
    ]


def _passes(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, name: str, device: str, rows: int, activations: Activations
) -> list[MemoryPart]:
    """A generator's largest pass, and its buffers for incoming and outgoing batches."""
    infos = env_batch_infos(config, spec)
    inputs = rows * (_row_bytes(shown(spec)) + 9)  # plus noise key and flag
    answers = rows * arena_layout(config, spec, infos, form).answer_dtype.itemsize
    kept = activations.kept(rows) + form.row_cache * rows
    streams = stream_places(config, spec) > 0  # the cache is then a certain part
    parts = [
        MemoryPart(name, "keys and values", device, kept * (not streams), certain=False, stays=False),
        MemoryPart(name, "pass", device, max(0, activations.acting(rows) - kept), certain=False, stays=False),
    ]
    if device == HOST:
        return [*parts, MemoryPart(name, "batches", HOST, inputs + answers, certain=False)]
    pinned = 2 * (inputs + answers) + 2 * min(CHUNK_BYTES, WeightsLayout.of(form.published).nbytes)
    return [
        *parts,
        MemoryPart(name, "batches", device, 3 * inputs + answers, certain=False),
        MemoryPart(name, "pinned batches and chunks", HOST, pinned, certain=False),
    ]


# ---------------------------------------------------------------- trainer


def _trainer(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    placed: Placed,
    layout: ArenaLayout,
    activations: Activations | None,
) -> list[MemoryPart]:
    ranks = placed.names["trainer"]
    parts: list[MemoryPart] = []
    for name in ranks:
        device = placed.seats[name].device
        parts += _rank(config, form, name, device, len(ranks), layout.steps)
        if activations is not None and config.training.versions:
            parts += _update(config, spec, form, name, device, len(ranks), layout, activations)
    if ranks and config.launcher == "local" and keeps_copy(placed.ends, _any_device):
        parts.append(
            MemoryPart(ranks[0], "published weights", placed.ends.trainer, WeightsLayout.of(form.published).nbytes)
        )
    return parts


def _any_device(_reader: str, _memory: str) -> bool:
    """Assume that devices of one machine can read each other's memory; if they cannot, less is kept."""
    return True


def _rank(config: RunConfig, form: PolicyForm, name: str, device: str, ranks: int, steps: int) -> list[MemoryPart]:
    """Memory that one of `ranks` ranks keeps between updates, and its duplicates during one. steps: of a sample."""
    learns = config.training.versions > 0
    share = ranks if config.placement.trainer.strategy == "shard" else 1
    keeps = HOST if share > 1 and config.placement.trainer.shard.cpu_offload else device
    offload = config.training.optimizer.offload
    buckets = ranks > share  # DDP keeps gradient buckets that others drop
    moments = -(-_MOMENTS * form.trainable_bytes // share) * learns
    parts = [
        MemoryPart(name, "weights", keeps, -(-form.train_bytes // share)),
        MemoryPart(name, "gradients", keeps, -(-form.trainable_bytes // share) * learns, stays=buckets),
        MemoryPart(name, "optimizer", HOST if offload else keeps, moments),
        MemoryPart(name, "reference policy", keeps, -(-reference_bytes(config, form) // share) * learns),
    ]
    # Accumulated beside DDP's buckets, which hold only the last micro-batch.
    if buckets and accumulates(config, steps, ranks, form.row_tokens):
        summed = form.trainable_bytes * learns
        parts.append(MemoryPart(name, "gradients, not yet summed", device, summed, stays=False))
    if share > 1:
        block = min(form.block_bytes or form.train_bytes, form.train_bytes)
        gathered = block + min(block, form.trainable_bytes) * learns
        parts.append(MemoryPart(name, "largest block, gathered", device, gathered, stays=False))
    if offload and device != HOST and learns:
        moved = _MOMENTS * min(form.trainable_bytes // share, PIECE_BYTES)
        parts.append(MemoryPart(name, "moments on their way", device, moved, certain=False, stays=False))
    return parts


def trained_part(config: RunConfig) -> str:
    """`policy.train` of a policy with the trait adapts."""
    policy: Any = config.policy
    return str(policy.train)


def reference_bytes(config: RunConfig, form: PolicyForm) -> int:
    """Bytes of the reference policy of the KL term. Policies with the trait adapts copy only the trained tensors, and
    with fresh adapters only the small heads, which are neglected here; others copy everything."""
    if not config.algorithm.kl.coef:
        return 0
    if settings_traits(config.policy).adapts:
        return 0 if trained_part(config) == "lora" else form.trainable_bytes
    return form.train_bytes


def _update(
    config: RunConfig,
    spec: EnvSpec,
    form: PolicyForm,
    name: str,
    device: str,
    ranks: int,
    layout: ArenaLayout,
    activations: Activations,
) -> list[MemoryPart]:
    """Memory of an update: its largest micro-batch, and its samples, packed and once per mini-batch."""
    row = _row_bytes(layout.obs) + _row_bytes(answer_specs(form, spec))
    rows = -(-update_rows(config, layout.steps) // ranks)
    mini = min(rows, config.training.minibatch_steps or rows)  # with 0 a streaming update also joins its parts
    micro = micro_batch_rows(config, layout.steps, ranks, form.row_tokens)
    frozen = activations.precomputed(rows)
    fits = frozen <= config.training.precomputed_mib * 2**20
    parts = [
        MemoryPart(name, "micro-batch", device, activations.training(micro), certain=False, stays=False),
        MemoryPart(
            name, "precomputed", device if fits else HOST, frozen + mini * frozen // rows, certain=False, stays=fits
        ),
        MemoryPart(name, "samples of an update", HOST, (rows + mini) * row, certain=False),
        MemoryPart(
            name, "state while it is written", HOST, _saved(config, form, name, ranks), certain=False, stays=False
        ),
    ]
    if device != HOST:  # one is prefetched
        parts.append(MemoryPart(name, "batches", device, 2 * micro * row, certain=False, stays=False))
    return parts


def _saved(config: RunConfig, form: PolicyForm, name: str, ranks: int) -> int:
    """Bytes of the copy that a rank saves: its part, or for rank 0 the whole state; 0 in one process."""
    if config.launcher == "inline":
        return 0
    trained = form.trainable_bytes if settings_traits(config.policy).adapts else form.train_bytes
    state = trained + _MOMENTS * form.trainable_bytes + reference_bytes(config, form)
    if config.placement.trainer.strategy == "shard":
        return -(-state // ranks)
    return state if name == TRAINER else 0


def _row_bytes(arrays: Mapping[str, ArraySpec]) -> int:
    return sum(array.nbytes for array in arrays.values())


# ------------------------------------------------------------ rows of the largest passes


def pass_rows(config: RunConfig, spec: EnvSpec, *, on_device: bool = False) -> int:
    """Rows of a generator's largest forward pass, including padding. on_device: generators are on CUDA devices."""
    infos = env_batch_infos(config, spec)
    if buckets := bucket_sizes(config, infos, on_device=on_device):
        return buckets[-1]
    most = largest_batch(config, infos)
    if not isinstance(config.batching, LimitedBatching):
        return most
    largest = max(slot.rows for own in infos for info in own for slot in info.slots)
    return max(largest, min(most, largest * config.batching.max_requests))


def stream_places(config: RunConfig, spec: EnvSpec) -> int:
    """Rows for which a streaming generator's engine has keys and values; 0 without streaming."""
    if not isinstance(config.batching, StreamsBatching):
        return 0
    slots = (slot.rows for own in env_batch_infos(config, spec) for info in own for slot in info.slots)
    return max(config.batching.max_rows, *slots)


def micro_batch_rows(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> int:
    """Chunk steps of a rank's largest forward and backward pass. steps: of the longest sample; row_tokens: of the
    longest chunk step, whose total `micro_batch_tokens` limits."""
    most, training = _minibatch_rows(config, steps, ranks), config.training
    if training.micro_batch_tokens and row_tokens:
        most = min(most, -(-training.micro_batch_tokens // row_tokens))
    return min(most, training.micro_batch_steps) if training.micro_batch_steps else most


def accumulates(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> bool:
    """Whether a rank accumulates gradients over several micro-batches per mini-batch."""
    rows, training = _minibatch_rows(config, steps, ranks), config.training
    by_tokens = training.micro_batch_tokens and rows * row_tokens > training.micro_batch_tokens
    return bool(by_tokens) or 0 < training.micro_batch_steps < rows


def _minibatch_rows(config: RunConfig, steps: int, ranks: int) -> int:
    """Maximum chunk steps of one rank in a mini-batch. Groups are dealt to ranks, so the fullest rank has about
    √(n/R) more than its share (docs/design/training-and-objectives.md)."""
    mini = config.training.mini_batch_samples * steps
    if config.training.minibatch_steps:
        mini = min(mini, config.training.minibatch_steps)
    return min(mini, math.ceil(mini / ranks + math.sqrt(mini / ranks))) if ranks > 1 else mini


def update_rows(config: RunConfig, steps: int) -> int:
    """Chunk steps of an update whose samples all have maximum length."""
    return config.training.batch_size * steps


def longest_sample(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> int:
    return step_settings(config, form.chunk, whole=bool(spec.chunk)).sample_steps(spec.max_steps)
