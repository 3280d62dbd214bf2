"""Mini-batches and their micro-batches: consecutive chunk steps, of at most so many chunk steps and so many tokens.

`Share` is here what a trainer of one rank has of an update: all of it.
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
    """steps: most chunk steps of a micro-batch, 0 for all of them. tokens: most tokens, as `policy` counts them, 0 for
    any number; a chunk step with more is a micro-batch of its own."""

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
    """last: of its mini-batch. counts: it is no padding."""

    batch: TrainingBatch
    last: bool
    counts: bool


class MiniBatch(NamedTuple):
    """This rank's part of the mini-batch of one optimizer step.

    own: its chunk steps. places: where they are in the mini-batch of `chunk_steps` on all ranks. sizes: of its
    micro-batches. padding: one micro-batch of a chunk step without any entry for each that other ranks have more;
    padded: the share of all ranks' micro-batches that are padding.
    """

    own: TrainingBatch
    places: Tensor | slice
    chunk_steps: int
    sizes: Sequence[int]
    padding: Sequence[TrainingBatch] = ()
    padded: float = 0.0

    def micro_batches(self, device: torch.device) -> Iterator[MicroBatch]:
        """Micro-batches on `device`, as many on every rank."""
        counted = len(self.sizes)
        for number, batch in enumerate(self.own.micro_batches(self.sizes, device, self.padding), 1):
            yield MicroBatch(batch, last=number == counted + len(self.padding), counts=number <= counted)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of an update of N chunk steps and M trajectories, numbered as one rank packs them.

    counts: chunk steps of each of the update's mini-batches of samples, which follow one another.
    """

    chunk_steps: int
    trajectories: int
    counts: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no trajectory is this rank's, so that what it packs is another's and counts nothing."""
        return False

    def collate(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        """The rank's own of these M trajectories; no other is read."""
        return collate(trajectories)

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Of a mini-batch's chunk steps `index` [n] this rank's: where they are among its own, and in `index`."""
        return index, slice(None)

    def minibatch(self, batch: TrainingBatch, index: Tensor, limits: MicroBatchLimits) -> MiniBatch:
        """Of the mini-batch of chunk steps `index` [n] what is this rank's; batch: all of the rank's own."""
        own = batch.take(index)
        return MiniBatch(own, slice(None), len(index), limits.sizes(len(index), own.obs, own.forward_inputs))


def sample_counts(steps: Sequence[int], samples: int) -> tuple[int, ...]:
    """Chunk steps of each mini-batch of so many samples (0: all of them), from those of each sample."""
    size = samples or len(steps)
    return tuple(sum(steps[first : first + size]) for first in range(0, len(steps), size))


def _cut(costs: Iterable[int], most_rows: int, most: int) -> list[int]:
    """How many of the costs fit together, one after another: [4, 4, 9, 1] with most = 8 is [2, 1, 1]."""
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
