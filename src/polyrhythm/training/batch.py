"""Trajectories of different lengths as one packed batch: their chunk steps one after another, nothing padded.

Trajectories of 3 and 2 chunk steps become N = 5 chunk steps with trajectory = (0, 0, 0, 1, 1) and M = 2 final
observations. Observations are copied once, here; afterwards the trajectories' memory may be reused.

Mini-batches and micro-batches are consecutive chunk steps, limited in chunk steps and tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyrhythm.policies.base import Policy, extended
from polyrhythm.specs import Trajectory

Arrays = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N chunk steps of M trajectories, on the host. Meaning and dtypes as in `specs.Trajectory`.

    obs, forward_inputs: name → [N,...]; final_obs: name → [M,...], the observation after each last chunk step.
    logprob [N,C,A], value [N] or [N,C], rewards and valid [N,C], version [N], newer [N,C] or None; trajectory [N]
    int64, the index of each chunk step's trajectory, non-decreasing; terminated, truncated [M] bool; group [M] int64.
    entries [N] int64: places of the chunk steps in the arena, None if unknown.
    """

    obs: Arrays
    final_obs: Arrays
    forward_inputs: Arrays
    logprob: Tensor
    value: Tensor
    rewards: Tensor
    valid: Tensor
    version: Tensor
    trajectory: Tensor
    terminated: Tensor
    truncated: Tensor
    group: Tensor
    newer: Tensor | None = None
    entries: Tensor | None = None

    @property
    def chunk_steps(self) -> int:
        return int(self.trajectory.shape[0])


def collate(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Pack trajectories, in order, into newly allocated host tensors."""
    steps = [t.steps for t in trajectories]
    if not steps or min(steps) == 0:
        raise ValueError(f"an update needs trajectories of at least one chunk step each, got chunk steps {steps}")
    first, newer = trajectories[0], [t.newer for t in trajectories if t.newer is not None]
    entries = [t.entries for t in trajectories if t.entries is not None]
    assert len(newer) in (0, len(steps)), "all samples of a run are streamed, or none"
    return PackedBatch(
        obs={name: _packed([t.obs[name][:-1] for t in trajectories]) for name in first.obs},
        final_obs={name: _packed([t.obs[name][-1:] for t in trajectories]) for name in first.obs},
        forward_inputs={name: _packed([t.forward_inputs[name] for t in trajectories]) for name in first.forward_inputs},
        logprob=_packed([t.logprob for t in trajectories]),
        value=_packed([t.value for t in trajectories]),
        rewards=_packed([t.rewards for t in trajectories]),
        valid=_packed([t.valid for t in trajectories]),
        version=_packed([t.version for t in trajectories]),
        trajectory=torch.repeat_interleave(torch.arange(len(steps)), torch.tensor(steps)),
        terminated=torch.tensor([t.terminated for t in trajectories]),
        truncated=torch.tensor([t.truncated for t in trajectories]),
        group=torch.tensor([t.group for t in trajectories], dtype=torch.int64),
        newer=_packed(newer) if newer else None,
        entries=_packed(entries) if len(entries) == len(steps) else None,
    )


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """What the objective needs of N chunk steps; every tensor has N first. Entries are those of `algorithms.levels`.

    valid [N,C] bool. At log-prob level (zero where masked): behavior, proximal, advantage, weight; reference where
    there is such a policy; correction, the factor of `algorithm.rollout_correction`; selected (bool), see
    `algorithms.entry_selection`. At reward level: old_value, returns, value_mask (bool), value_weight where the value
    loss is aggregated by weights. alpha [N] or [N,C] where the proximal policy is interpolated, see
    `algorithms.proximal`; `proximal` is the behaviour policy then.
    """

    obs: Arrays
    forward_inputs: Arrays
    valid: Tensor
    behavior: Tensor
    proximal: Tensor
    advantage: Tensor
    weight: Tensor
    old_value: Tensor
    returns: Tensor
    value_mask: Tensor
    value_weight: Tensor | None = None
    reference: Tensor | None = None
    alpha: Tensor | None = None
    correction: Tensor | None = None
    selected: Tensor | None = None

    def __len__(self) -> int:
        return int(self.valid.shape[0])

    def take(self, index: Tensor) -> TrainingBatch:
        """The chunk steps at `index` (int64, any order), copied: one `index_select` per tensor, on its device. Rows of
        a pool are copied later, micro-batch by micro-batch."""
        return self._map(lambda x: x.index_select(0, index.to(x.device)))

    def masked(self) -> TrainingBatch:
        """The same chunk steps, all masked: everything but the inputs of the policy is zero."""
        zeros = replace(self, obs={}, forward_inputs={})._map(torch.zeros_like)
        obs = {name: x[:] for name, x in self.obs.items()}
        none = torch.zeros_like(self.weight, dtype=torch.bool)
        return replace(zeros, obs=obs, forward_inputs=self.forward_inputs, selected=none)

    def micro_batches(
        self, sizes: Sequence[int], device: torch.device, padding: Sequence[TrainingBatch] = ()
    ) -> Iterator[TrainingBatch]:
        """Consecutive views of the given sizes, then those of `padding`, on `device`, transferred one ahead."""
        if len(sizes) == 1 and device.type == "cpu" and not padding:
            yield self._map(lambda x: x[:])
            return
        ends = list(accumulate(sizes))
        places = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        pieces = (self._map(lambda x, own=own: x[own]) for own in places)  # type: ignore[misc]
        yield from send_ahead(chain(pieces, padding), device, TrainingBatch._map)

    def _map(self, change: Callable[[Tensor], Tensor]) -> TrainingBatch:
        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(x) for name, x in value.items()}
            return None if value is None else change(value)

        return TrainingBatch(**{field.name: changed(getattr(self, field.name)) for field in fields(self)})


def minibatches(counts: Sequence[int], size: int, seed: Sequence[int]) -> list[Tensor]:
    """The chunk steps of each optimizer step of an epoch, as int64 indices.

    counts: numbers of consecutive chunk steps that share no optimizer step. Each such group is shuffled and cut into
    the fewest pieces of at most `size` (0: one piece), whose sizes differ by at most one: 65 chunk steps at size 64 are
    33 + 32, because an optimizer step on a single chunk step would count as much as one on 64. The order depends on
    `seed` and the counts alone, not on any global random state.
    """
    rng, first, found = np.random.default_rng(list(seed)), 0, list[Tensor]()
    for count in counts:
        order = first + rng.permutation(count)
        found += map(torch.from_numpy, np.array_split(order, -(-count // size) if size else 1))
        first += count
    return found


def slices(arrays: Mapping[str, Tensor], rows: slice, device: torch.device) -> Arrays:
    return {name: x[rows].to(device, non_blocking=True) for name, x in arrays.items()}


def _packed(arrays: Sequence[NDArray[np.generic]]) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def all_of_version(samples: Iterable[Trajectory | PackedBatch], version: int | None) -> bool:
    """Whether weights of this version made all chunk steps; False if version is None."""
    return version is not None and all(bool((x.version == version).all()) for x in samples)


T = TypeVar("T")
#: Applies a function to every tensor of a piece.
Map = Callable[[T, Callable[[Tensor], Tensor]], T]


def send_ahead(pieces: Iterable[T], device: torch.device, map_tensors: Map[T]) -> Iterator[T]:
    """The pieces on `device`, in order; each is transferred from pinned memory on a separate stream while the previous
    one is used. Tensors already on `device` are not copied."""
    if device.type != "cuda":
        yield from (map_tensors(piece, lambda x: x.to(device)) for piece in pieces)
        return
    stream = torch.cuda.Stream(device)
    waiting: deque[tuple[T, Any]] = deque()

    def receive() -> T:
        piece, sent = waiting.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(sent)
        return map_tensors(piece, lambda x: _use_on(current, x))

    for piece in pieces:
        with torch.cuda.stream(stream):
            moved = map_tensors(piece, lambda x: _send(x, device))
        waiting.append((moved, stream.record_event()))
        if len(waiting) > 1:
            yield receive()
    while waiting:
        yield receive()


def _send(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu else x.to(device)


def _use_on(stream: Any, x: Tensor) -> Tensor:
    """Tell the allocator that the tensor is used on a stream other than its own."""
    if x.is_cuda:
        x.record_stream(stream)
    return x


class MicroBatchLimits(NamedTuple):
    """steps: maximum chunk steps of a micro-batch, 0 for no limit. tokens: maximum tokens, as counted by `policy`, 0
    for no limit; a longer chunk step is a micro-batch of its own."""

    policy: Policy
    steps: int
    tokens: int = 0

    def sizes(self, rows: int, obs: Mapping[str, Tensor], forward_inputs: Mapping[str, Tensor]) -> list[int]:
        """Chunk steps of each micro-batch of these rows."""
        if not self.tokens:
            size = self.steps or max(rows, 1)
            return [min(size, rows - first) for first in range(0, rows, size)]
        return _cut(extended(self.policy).row_tokens(obs, forward_inputs).tolist(), self.steps or rows, self.tokens)


class MicroBatch(NamedTuple):
    """last: in its mini-batch. counts: it is not padding."""

    batch: TrainingBatch
    last: bool
    counts: bool


class MiniBatch(NamedTuple):
    """This rank's part of the mini-batch of one optimizer step.

    own: its chunk steps. places: their positions in the mini-batch of `chunk_steps` on all ranks. sizes: of its
    micro-batches. padding: masked micro-batches of one chunk step that bring their number to that of the other ranks;
    padded: the share of all ranks' micro-batches that are padding.
    """

    own: TrainingBatch
    places: Tensor | slice
    chunk_steps: int
    sizes: Sequence[int]
    padding: Sequence[TrainingBatch] = ()
    padded: float = 0.0

    def micro_batches(self, device: torch.device) -> Iterator[MicroBatch]:
        """Micro-batches on `device`, equally many on every rank."""
        counted = len(self.sizes)
        for number, batch in enumerate(self.own.micro_batches(self.sizes, device, self.padding), 1):
            yield MicroBatch(batch, last=number == counted + len(self.padding), counts=number <= counted)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of an update of N chunk steps and M trajectories, numbered as one rank packs them; here all of it.
    counts: chunk steps of each of the update's successive mini-batches of samples."""

    chunk_steps: int
    trajectories: int
    counts: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no trajectory, so that it packs another's, masked."""
        return False

    @property
    def read(self) -> Sequence[int]:
        """Indices of the trajectories that `collate` reads."""
        return range(self.trajectories)

    def collate(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """Collate the rank's own of these M trajectories; no other is read."""
        return collate(trajectories)

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Positions of this rank's chunk steps among its own and in the mini-batch `index` [n]."""
        return index, slice(None)

    def minibatch(self, batch: TrainingBatch, index: Tensor, limits: MicroBatchLimits) -> MiniBatch:
        """This rank's part of the mini-batch of chunk steps `index` [n]; batch: all of the rank's own."""
        own = batch.take(index)
        return MiniBatch(own, slice(None), len(index), limits.sizes(len(index), own.obs, own.forward_inputs))


def sample_counts(steps: Sequence[int], samples: int) -> tuple[int, ...]:
    """Chunk steps of each mini-batch of `samples` samples (0: all), from those of each sample."""
    size = samples or len(steps)
    return tuple(sum(steps[first : first + size]) for first in range(0, len(steps), size))


def _cut(costs: Iterable[int], most_rows: int, most: int) -> list[int]:
    """Numbers of consecutive costs that fit together: [4, 4, 9, 1] with most = 8 is [2, 1, 1]."""
    sizes: list[int] = []
    total = 0
    for cost in costs:
        if sizes and sizes[-1] < most_rows and total + cost <= most:
            sizes[-1] += 1
            total += cost
        else:
            sizes.append(1)
            total = cost
    return sizes
