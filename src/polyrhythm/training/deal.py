"""Deals an update's trajectories to ranks, and says which of its chunk steps are whose: arithmetic, the same on every
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
