"""Assigns an update's trajectories to ranks, and selects a rank's part of each mini-batch;
deterministic on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import (
    MicroBatchLimits,
    MiniBatch,
    PackedBatch,
    Share,
    TrainingBatch,
    collate,
    sample_counts,
)


def deal(groups: Sequence[int], steps: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the trajectories of each rank, ascending: [ranks] lists.

    groups, steps: of each trajectory. Whole groups are assigned, the longest first, to the rank with the fewest chunk
    steps; ties go to the first. Example: groups (7, 7, 8, 9), steps (2, 3, 4, 1), 2 ranks → [[0, 1], [2, 3]].
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    length = {group: sum(steps[i] for i in own) for group, own in members.items()}
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for group in sorted(members, key=lambda group: -length[group]):
        rank = loads.index(min(loads))
        dealt[rank] += members[group]
        loads[rank] += length[group]
    return [sorted(own) for own in dealt]


@dataclass(frozen=True, slots=True)
class DealtShare(Share):
    """One rank's share.

    own: its trajectories. borrowed: the trajectory whose chunk step it uses as padding if it has none; else None. owner
    [N]: rank of each chunk step; place [N]: index among those of its rank. totals: sums each number over the ranks.
    """

    rank: int
    ranks: int
    own: tuple[int, ...]
    borrowed: int | None
    owner: Tensor
    place: Tensor
    totals: Callable[[Sequence[float]], Sequence[float]]

    @property
    def is_empty(self) -> bool:
        return self.borrowed is not None

    def collate(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        if self.borrowed is None:
            return collate([trajectories[i] for i in self.own])
        packed = collate([trajectories[self.borrowed]])
        return replace(packed, valid=torch.zeros_like(packed.valid))

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | slice]:
        at = (self.owner[index] == self.rank).nonzero().squeeze(1)
        return self.place[index[at]], at

    def minibatch(self, batch: TrainingBatch, index: Tensor, limits: MicroBatchLimits) -> MiniBatch:
        rows, places = self.pick(index)
        own = batch.take(rows)
        sizes = limits.sizes(len(rows), own.obs, own.forward_inputs)
        counts = self._micro_batches_by_rank(len(sizes)) if limits.tokens else self.micro_steps(index, limits.steps)
        missing = [max(counts) - count for count in counts]
        lacking = missing[self.rank]
        padding = [batch.take(torch.tensor([0])).masked()] * lacking if lacking else ()
        return MiniBatch(own, places, len(index), sizes, padding, sum(missing) / (max(counts) * len(counts)))

    def micro_steps(self, index: Tensor, size: int) -> list[int]:
        """Each rank's number of micro-batches of at most `size` chunk steps (0: one) in a mini-batch."""
        counts = torch.bincount(self.owner[index], minlength=self.ranks).tolist()
        return [-(-count // size) if size else min(count, 1) for count in counts]

    def _micro_batches_by_rank(self, own: int) -> list[int]:
        """Number of micro-batches of each rank, exchanged because it depends on token counts known only there."""
        return [int(count) for count in self.totals([own * (rank == self.rank) for rank in range(self.ranks)])]


def share_of(
    groups: Sequence[int],
    steps: Sequence[int],
    rank: int,
    ranks: int,
    samples: int = 0,
    totals: Callable[[Sequence[float]], Sequence[float]] = tuple,
) -> DealtShare:
    """The share of `rank` of `ranks`, assigned mini-batch by mini-batch. samples: trajectories of a
    mini-batch; 0 for all in one."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for first in range(0, len(steps), samples or len(steps)):
        cut = slice(first, first + (samples or len(steps)))
        for of_rank, more in zip(dealt, deal(groups[cut], steps[cut], ranks), strict=True):
            of_rank += [first + index for index in more]
    of_trajectory = torch.empty(len(steps), dtype=torch.int64)
    for number, dealt_to in enumerate(dealt):
        of_trajectory[dealt_to] = number
    owner = of_trajectory.repeat_interleave(torch.tensor(steps))
    place = torch.empty_like(owner)
    for number in range(ranks):
        mine = owner == number
        place[mine] = torch.arange(int(mine.sum()))
    own = tuple(dealt[rank])
    borrowed = None if own else min(range(len(steps)), key=steps.__getitem__)
    counts = sample_counts(steps, samples)
    return DealtShare(len(owner), len(steps), counts, rank, ranks, own, borrowed, owner, place, totals)
