"""Cuts an update into mini-batches and micro-batches, and deals them to ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from polyrhythm.policies.base import Policy, extended
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import PackedBatch, TrainingBatch, collate
from polyrhythm.training.ranks import Ranks


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


def deal(groups: Sequence[int], steps: Sequence[int], ranks: int) -> list[list[int]]:
    """Which trajectories each rank trains on: [ranks] lists of their indices, ascending.

    groups, steps: of each trajectory. Whole groups, the longest first to the rank with the fewest chunk steps; of equal
    ones the first. Example: groups (7, 7, 8, 9), steps (2, 3, 4, 1), 2 ranks → [[0, 1], [2, 3]].
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
class Share:
    """One rank's share of an update of N chunk steps and M trajectories, numbered as one rank would pack them.

    own: its trajectories. spare: the trajectory of which it takes a chunk step to pad with, as it has none; else None.
    counts: chunk steps of each of the update's mini-batches of samples, which follow one another.
    owner [N]: the rank of each chunk step; place [N]: where it is among those of its rank.
    """

    rank: int
    ranks: int
    own: tuple[int, ...]
    spare: int | None
    chunk_steps: int
    trajectories: int
    owner: Tensor
    place: Tensor
    counts: tuple[int, ...]

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Of a mini-batch's chunk steps `index` [n] this rank's: where they are among its own, and in `index`."""
        if self.ranks == 1:
            return index, slice(None)
        at = (self.owner[index] == self.rank).nonzero().squeeze(1)
        return self.place[index[at]], at

    def micro_steps(self, index: Tensor, size: int) -> list[int]:
        """How many micro-batches of at most `size` chunk steps (0: all at once) each rank has of a mini-batch."""
        counts = torch.bincount(self.owner[index], minlength=self.ranks).tolist() if self.ranks > 1 else [len(index)]
        return [-(-count // size) if size else min(count, 1) for count in counts]


def share_of(groups: Sequence[int], steps: Sequence[int], rank: int, ranks: int, samples: int = 0) -> Share:
    """The share of `rank` where trajectories are dealt to so many ranks, mini-batch by mini-batch. samples:
    trajectories of a mini-batch; 0 for all in one."""
    cuts = [slice(first, first + (samples or len(steps))) for first in range(0, len(steps), samples or len(steps))]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for cut in cuts:
        for of_rank, more in zip(dealt, deal(groups[cut], steps[cut], ranks), strict=True):
            of_rank += [cut.start + index for index in more]
    of_trajectory = torch.empty(len(steps), dtype=torch.int64)
    for number, dealt_to in enumerate(dealt):
        of_trajectory[dealt_to] = number
    owner = of_trajectory.repeat_interleave(torch.tensor(steps))
    place = torch.empty_like(owner)
    for number in range(ranks):
        mine = owner == number
        place[mine] = torch.arange(int(mine.sum()))
    own = tuple(dealt[rank])
    spare = None if own else min(range(len(steps)), key=steps.__getitem__)
    counts = tuple(sum(steps[cut]) for cut in cuts)
    return Share(rank, ranks, own, spare, len(owner), len(steps), owner, place, counts)


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
