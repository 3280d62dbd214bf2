"""Memory of every station of a run, by device: pure arithmetic on declared forms.

Parts are *certain* if they follow from shapes (weights, gradients, moments, published tensors, the arena); others are
estimated (passes, batches, samples at maximum length).

Invariant: the parts of a device add up to the bytes that its stations hold at the same time, each byte once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polyrhythm.config.schema import RunConfig
from polyrhythm.config.sections.placement import PlacementSettings
from polyrhythm.config.sections.rollout import StreamsBatching
from polyrhythm.pipeline.array_specs import (
    answer_specs,
    arena_layout,
    bucket_sizes,
    env_batch_infos,
    largest_batch,
    shown,
    step_settings,
)
from polyrhythm.pipeline.placed import Placed, evaluator_name, generator_names, place, prefix_lenders
from polyrhythm.plugins.memory_estimate.activations import Activations
from polyrhythm.plugins.ranks import count_shards
from polyrhythm.policies.form import PolicyForm
from polyrhythm.policies.traits import settings_traits
from polyrhythm.runtime.devices import is_simulated
from polyrhythm.runtime.memory.published import keeps_copy, shared_nbytes
from polyrhythm.runtime.memory.receiver import CHUNK_BYTES
from polyrhythm.runtime.messages import TRAINER
from polyrhythm.specs import ArraySpec, EnvSpec, WeightsLayout
from polyrhythm.training.optim import PIECE_BYTES

Sharing = Literal["share", "lease"]

#: AdamW keeps two moments per trained number.
_MOMENTS = 2
#: Station that stands for what all processes of the host share.
SHARED = "shared"
HOST = "cpu"
#: Purpose of the versions that a host's processes share.
PUBLISHED = "published weights"
#: Purpose of what generators lend the trainer.
LENT = "lent prefixes"
#: Purposes of what an update computes once by frozen parts: for all of its samples, and copied for a mini-batch.
PRECOMPUTED = ("precomputed", "precomputed of a mini-batch")


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
        name = f"{part.purpose} (host)" if offloaded else part.purpose
        found.setdefault(part.station, {})[name] = part.nbytes
    return found


def list_parts(
    config: RunConfig, spec: EnvSpec, form: PolicyForm, placed: Placed, *, activations: Activations | None = None
) -> list[MemoryPart]:
    """All parts of the stations. activations: None omits estimated parts."""
    return [part for part in _Parts(config, spec, form, placed, activations).all() if part.nbytes]


def _memory_of(device: str) -> str:
    """Where the tensors of a station on this device are: a simulated device has its memory on the host."""
    return HOST if is_simulated(device) else device


class _Parts:
    """The parts of a run's stations; some may have no bytes."""

    def __init__(
        self, config: RunConfig, spec: EnvSpec, form: PolicyForm, placed: Placed, activations: Activations | None
    ) -> None:
        self._config, self._spec, self._form, self._placed, self._activations = config, spec, form, placed, activations
        self._ranks = placed.names["trainer"]
        #: Ranks that share the trainer's tensors, one if each has all.
        self._share = count_shards(config.placement.trainer, [placed.seats[name].node for name in self._ranks])
        trains = bool(self._ranks)
        infos = env_batch_infos(config, spec, trainer=trains)
        self._layout = arena_layout(config, spec, infos, form, trainer=trains)
        self._published = WeightsLayout.of(form.published)
        traits = settings_traits(config.policy).policy
        lends = self._share == 1 and traits is not None and traits.acts_from_precomputed
        #: Generators that lend the trainer what frozen parts of the policy give.
        self._lenders = prefix_lenders(config, placed) if lends else []

    def all(self) -> Iterator[MemoryPart]:
        placed, inline = self._placed, self._config.launcher == "inline"
        kept = self._ranks and inline and placed.lease is None  # versions stay on the trainer's device
        yield MemoryPart(SHARED, "arena", HOST, self._layout.nbytes)
        published = shared_nbytes(self._published)
        yield MemoryPart(SHARED, PUBLISHED, _memory_of(placed.ends.trainer) if kept else HOST, published)
        for name in placed.names["generators"]:
            yield from self._generator(name, _memory_of(placed.seats[name].device))
            if self._activations is not None:
                yield from self._passes(name, _memory_of(placed.seats[name].device), self._activations)
        for name in self._ranks:
            yield from self._rank(name, _memory_of(placed.seats[name].device))
            if self._activations is not None and self._config.training.versions:
                yield from self._update(name, _memory_of(placed.seats[name].device), self._activations)
        # Devices of one machine are assumed to read each other's memory; if they cannot, less is kept. The same on a
        # cluster, if the trainer's node is not main's.
        if self._ranks and not inline and keeps_copy(placed.ends, lambda *_: True):
            device, certain = _memory_of(placed.ends.trainer), self._config.launcher == "local"
            yield MemoryPart(self._ranks[0], PUBLISHED, device, self._published.nbytes, certain=certain)

    def _generator(self, name: str, device: str) -> Iterator[MemoryPart]:
        """A generator's memory: its policy, the evaluation's, on a device a version in transfer, and with streaming the
        keys and values of all running rows, or the memory of another engine."""
        form, generates = self._form, name in generator_names(self._config)
        both = generates and name == evaluator_name(self._config)
        places = stream_places(self._config, self._spec)
        engine = {"keys and values": form.row_cache * places}
        if form.engine is not None:
            engine = dict(form.engine) if places else {}
        yield MemoryPart(name, "weights", device, form.act_bytes)
        yield MemoryPart(name, "weights of the evaluation", device, form.act_bytes * both)
        staged = self._published.nbytes * (device != HOST and generates)
        yield MemoryPart(name, "staging", device, staged, stays=False)
        for purpose, kept in engine.items():
            yield MemoryPart(name, purpose, device, kept * (1 + both), stays=False)

    def _passes(self, name: str, device: str, activations: Activations) -> Iterator[MemoryPart]:
        """A generator's largest pass, and its buffers for incoming and outgoing batches."""
        rows = pass_rows(self._config, self._spec, on_device=device != HOST)
        inputs = rows * (_row_bytes(shown(self._spec)) + 9)  # plus noise key and flag
        answers = rows * self._layout.answer_dtype.itemsize
        kept = activations.kept(rows) + self._form.row_cache * rows
        streams = stream_places(self._config, self._spec) > 0  # the cache is then a certain part
        yield MemoryPart(name, "keys and values", device, kept * (not streams), certain=False, stays=False)
        yield MemoryPart(name, "pass", device, max(0, activations.acting(rows) - kept), certain=False, stays=False)
        if device == HOST:
            yield MemoryPart(name, "batches", HOST, inputs + answers, certain=False)
            return
        if name in self._lenders:
            yield MemoryPart(name, LENT, device, activations.precomputed(rows), certain=False, stays=False)
        pinned = 2 * (inputs + answers) + 2 * min(CHUNK_BYTES, self._published.nbytes)
        yield MemoryPart(name, "batches", device, 3 * inputs + answers, certain=False)
        yield MemoryPart(name, "pinned batches and chunks", HOST, pinned, certain=False)

    def _rank(self, name: str, device: str) -> Iterator[MemoryPart]:
        """Memory that a rank keeps between updates, and its duplicates during one."""
        config, form, ranks = self._config, self._form, len(self._ranks)
        learns = config.training.versions > 0
        share = self._share
        keeps = HOST if share > 1 and config.placement.trainer.shard.cpu_offload else device
        offload = config.training.optimizer.offload
        # DDP keeps gradient buckets that others drop.
        buckets = ranks > 1 and config.placement.trainer.strategy == "replicate"
        trained, moments = form.trainable_bytes * learns, _MOMENTS * form.trainable_bytes * learns
        yield MemoryPart(name, "weights", keeps, -(-form.train_bytes // share))
        yield MemoryPart(name, "gradients", keeps, -(-trained // share), stays=buckets)
        yield MemoryPart(name, "optimizer", HOST if offload else keeps, -(-moments // share))
        yield MemoryPart(name, "reference policy", keeps, -(-self._reference() // share) * learns)
        # Accumulated beside DDP's buckets, which hold only the last micro-batch.
        if buckets and accumulates(config, self._layout.steps, ranks, form.row_tokens):
            yield MemoryPart(name, "gradients, not yet summed", device, trained, stays=False)
        if share > 1:
            block = min(form.block_bytes or form.train_bytes, form.train_bytes)
            gathered = block + min(block, trained)
            yield MemoryPart(name, "largest block, gathered", device, gathered, stays=False)
        if offload and learns:
            yield MemoryPart(name, "moments on their way", device, self._moved(), certain=False, stays=False)

    def _reference(self) -> int:
        """Bytes of the reference policy of the KL term. Policies with the trait adapts copy only the trained tensors,
        and with adapters that begin at zero only the small heads, which are neglected here; others copy everything."""
        config, policy = self._config, self._config.policy
        if not config.algorithm.kl.coef or not settings_traits(policy).adapts:
            return self._form.train_bytes * bool(config.algorithm.kl.coef)
        trained: Any = policy
        fresh = trained.train == "lora" and not config.init_from and config.supervised is None
        return 0 if fresh else self._form.trainable_bytes

    def _update(self, name: str, device: str, activations: Activations) -> Iterator[MemoryPart]:
        """Memory of an update: its largest micro-batch, and its samples, packed and once per mini-batch."""
        config, form, steps, ranks = self._config, self._form, self._layout.steps, len(self._ranks)
        row = _row_bytes(self._layout.obs) + _row_bytes(answer_specs(form, self._spec))
        rows = -(-config.training.batch_size * steps // ranks)
        mini = min(rows, config.training.minibatch_steps or rows)  # with 0 a streaming update also joins its parts
        micro = micro_batch_rows(config, steps, ranks, form.row_tokens)
        frozen, limit = activations.precomputed(rows), config.training.precomputed_mib * 2**20
        entries = self._layout.blocks * steps
        pool = min(activations.precomputed(entries), limit) if self._lenders else 0
        fits = frozen <= limit - pool
        held = device if fits else HOST
        taken = 0 if pool else mini * frozen // rows  # beside a pool, micro-batches are read
        passes = self._micro_batch(activations)
        before = activations.precomputing(micro) - taken * (held == device)  # before mini-batches
        yield MemoryPart(name, "micro-batch", device, max(passes, before), certain=False, stays=False)
        yield MemoryPart(name, LENT, device, pool, certain=False)
        yield MemoryPart(name, PRECOMPUTED[0], held, frozen, certain=False, stays=fits)
        yield MemoryPart(name, PRECOMPUTED[1], held, taken, certain=False, stays=fits)
        yield MemoryPart(name, "samples of an update", HOST, (rows + mini) * row, certain=False)
        yield MemoryPart(name, "state while it is written", HOST, self._saved(name), certain=False, stays=False)
        read = pool or (not fits and device != HOST)
        sent = row * (device != HOST) + frozen // rows * bool(read)
        yield MemoryPart(name, "batches", device, 2 * micro * sent, certain=False, stays=False)  # one is prefetched

    def _micro_batch(self, activations: Activations) -> int:
        """Bytes of the largest micro-batch's passes beside all gradients. In the first one of a mini-batch these come
        as activations go, unless ranks keep them in buckets; with a smaller second one that may be the largest."""
        config, ranks = self._config, len(self._ranks)
        mini = minibatch_rows(config, self._layout.steps, ranks)
        micro = micro_batch_rows(config, self._layout.steps, ranks, self._form.row_tokens)
        if ranks > 1 or mini >= 2 * micro:
            return activations.training(micro)
        first = activations.training(micro, gradients=self._form.trainable_bytes)
        return max(first, activations.training(mini - micro))

    def _moved(self) -> int:
        """Bytes of offloaded moments in a step, beyond those of the passes, which are over by then."""
        moved = _MOMENTS * min(self._form.trainable_bytes // self._share, PIECE_BYTES)
        return max(0, moved - (self._micro_batch(self._activations) if self._activations is not None else 0))

    def _saved(self, name: str) -> int:
        """Bytes of the copy that a rank saves: its part, or for rank 0 the whole state; 0 in one process."""
        config, form = self._config, self._form
        if config.launcher == "inline":
            return 0
        trained = form.trainable_bytes if settings_traits(config.policy).adapts else form.train_bytes
        state = trained + _MOMENTS * form.trainable_bytes + self._reference()
        if config.placement.trainer.strategy == "shard":
            return -(-state // self._share)
        return state if name == TRAINER else 0


def _row_bytes(arrays: Mapping[str, ArraySpec]) -> int:
    return sum(array.nbytes for array in arrays.values())


def pass_rows(config: RunConfig, spec: EnvSpec, *, on_device: bool = False) -> int:
    """Rows of a generator's largest forward pass, including padding. on_device: generators are on CUDA devices."""
    infos = env_batch_infos(config, spec)
    if buckets := bucket_sizes(config, infos, on_device=on_device):
        return buckets[-1]
    return largest_batch(config, infos)


def stream_places(config: RunConfig, spec: EnvSpec) -> int:
    """Rows for which a streaming generator's engine has keys and values; 0 without streaming."""
    if not isinstance(config.batching, StreamsBatching):
        return 0
    slots = (slot.rows for own in env_batch_infos(config, spec) for info in own for slot in info.slots)
    return max(config.batching.max_rows, *slots)


def micro_batch_rows(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> int:
    """Chunk steps of a rank's largest forward and backward pass. steps: of the longest sample; row_tokens: of the
    longest chunk step, whose total `micro_batch_tokens` limits."""
    most, training = minibatch_rows(config, steps, ranks), config.training
    if training.micro_batch_tokens and row_tokens:
        most = min(most, -(-training.micro_batch_tokens // row_tokens))
    return min(most, training.micro_batch_steps) if training.micro_batch_steps else most


def accumulates(config: RunConfig, steps: int, ranks: int = 1, row_tokens: int = 0) -> bool:
    """Whether a rank accumulates gradients over several micro-batches per mini-batch."""
    rows, training = minibatch_rows(config, steps, ranks), config.training
    by_tokens = training.micro_batch_tokens and rows * row_tokens > training.micro_batch_tokens
    return bool(by_tokens) or 0 < training.micro_batch_steps < rows


def minibatch_rows(config: RunConfig, steps: int, ranks: int) -> int:
    """Maximum chunk steps of one rank in a mini-batch. Groups are dealt to ranks, so the fullest rank has about
    √(n/R) more than its share (docs/design/training-and-objectives.md)."""
    mini = config.training.mini_batch_samples * steps
    if config.training.minibatch_steps:
        mini = min(mini, config.training.minibatch_steps)
    return min(mini, math.ceil(mini / ranks + math.sqrt(mini / ranks))) if ranks > 1 else mini


def longest_sample(config: RunConfig, spec: EnvSpec, form: PolicyForm) -> int:
    return step_settings(config, form.chunk, whole=bool(spec.chunk)).sample_steps(spec.max_steps)
