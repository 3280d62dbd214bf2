"""One rank's part of an update and of its mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import PackedBatch, TrainingBatch, collate
from polyrhythm.training.deal import Share, share_of
from polyrhythm.training.micro_batches import MicroBatchLimits
from polyrhythm.training.ranks import Ranks


def take_share(trajectories: Sequence[Trajectory], ranks: Ranks, samples: int = 0) -> tuple[Share, PackedBatch]:
    """This rank's share of an update's trajectories, which alone are read, collated. A rank without any has a sample of
    another, in which no entry counts. samples: as in `share_of`."""
    steps = [t.steps for t in trajectories]
    if not steps or min(steps) == 0:
        collate(trajectories)  # refuses them
    share = share_of([t.group for t in trajectories], steps, ranks.rank, ranks.size, samples)
    if share.spare is None:
        return share, collate([trajectories[i] for i in share.own])
    packed = collate([trajectories[share.spare]])
    return share, replace(packed, valid=torch.zeros_like(packed.valid))


class RankBatch(NamedTuple):
    """One rank's part of a mini-batch.

    own: its chunk steps. places: where they are in the mini-batch of `chunk_steps`. sizes: of its micro-batches.
    micro_steps: as many on every rank; this rank's last are those of `padding`, of one chunk step without any entry.
    padded: share of all ranks' that are.
    """

    own: TrainingBatch
    places: Tensor | slice
    chunk_steps: int
    sizes: Sequence[int]
    micro_steps: int
    padding: Sequence[TrainingBatch]
    padded: float

    def micro_batches(self, device: torch.device) -> Iterator[MicroBatch]:
        """Micro-batches on `device`."""
        counted = self.micro_steps - len(self.padding)
        for number, batch in enumerate(self.own.micro_batches(self.sizes, device, self.padding), 1):
            yield MicroBatch(batch, last=number == self.micro_steps, counts=number <= counted)


class MicroBatch(NamedTuple):
    """last: of its mini-batch. counts: it is no padding."""

    batch: TrainingBatch
    last: bool
    counts: bool


def rank_batch(batch: TrainingBatch, share: Share, index: Tensor, limits: MicroBatchLimits, ranks: Ranks) -> RankBatch:
    """Of the mini-batch of the update's chunk steps `index` what is this rank's."""
    rows, places = share.pick(index)
    own = batch.take(rows)
    sizes = limits.sizes(len(rows), own.obs, own.forward_inputs)
    counts = _counts_by_rank(len(sizes), ranks) if limits.tokens else share.micro_steps(index, limits.steps)
    largest = max(counts)
    missing = [largest - count for count in counts]
    lacking = missing[share.rank]
    padding = [batch.take(torch.tensor([0])).masked()] * lacking if lacking else ()
    padded = sum(missing) / (largest * len(counts))
    return RankBatch(own, places, len(index), sizes, largest, padding, padded)


def _counts_by_rank(own: int, ranks: Ranks) -> list[int]:
    """Micro-batches of each rank, which no other knows where they go by tokens."""
    return [int(count) for count in ranks.totals([own * (rank == ranks.rank) for rank in range(ranks.size)])]
