"""Mini-batches and their micro-batches: consecutive chunk steps, limited in chunk steps and tokens.

`Share` here is that of a single rank: the whole update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, extended
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import PackedBatch, TrainingBatch, collate


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
    """A rank's share of an update of N chunk steps and M trajectories, numbered as one rank packs them. counts: chunk
    steps of each of the update's successive mini-batches of samples."""

    chunk_steps: int
    trajectories: int
    counts: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether this rank has no trajectory, so that it packs another's, masked."""
        return False

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
