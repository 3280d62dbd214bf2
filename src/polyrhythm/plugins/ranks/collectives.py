"""Ranks in separate processes, over torch.distributed: sums, and each rank's share of an update.

An update's trajectories and a rank's part of each mini-batch are assigned deterministically on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import ProcessGroup, Store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

from polyrhythm.config.sections.placement import ShardSettings
from polyrhythm.errors import ConfigError
from polyrhythm.plugins.ranks.rendezvous import FOREVER, cannot_connect, connecting, left, meet
from polyrhythm.plugins.ranks.shards import is_sharded
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
from polyrhythm.training.ranks import Meeting, Ranks

#: Seconds beyond the deadline of their meeting in which ranks have to connect.
CONNECT_S = 5.0


class ProcessRanks(Ranks):
    """Common part of both strategies (`training.ranks`).

    Host tensors go over gloo, device tensors over NCCL if every rank has a GPU of its own, else over gloo. own_device:
    that GPU, None without one. host_group, background, publishing: process groups for host tensors, of the saving
    thread, and of the publishing thread.
    """

    device: torch.device

    def __init__(self, rank: int, size: int, meeting: Meeting, device: str, shard: ShardSettings | None) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.settings = shard or ShardSettings()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with connecting(meeting):
            store = meet(rank, size, meeting)
            backend = _backend(store, rank, size, self.device)
            # Without a device NCCL would connect at its first collective, when the interface is no longer set.
            self.own_device = self.device if "nccl" in backend else None
            limit = left(meeting, CONNECT_S) if meeting.address else FOREVER
            try:
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=self.own_device
                )
                self.host_group = dist.new_group(backend="gloo", timeout=limit)
                self.background = dist.new_group(backend="gloo", timeout=limit)
                self.publishing = dist.new_group(backend="gloo", timeout=limit)
                groups = self.connect(meeting)
            except RuntimeError as error:
                if meeting.address:
                    raise cannot_connect(rank, meeting, error) from error
                raise
        for group in (dist.group.WORLD, self.host_group, self.background, self.publishing, *groups):
            set_timeout(FOREVER, group)

    def connect(self, meeting: Meeting) -> Sequence[ProcessGroup]:  # noqa: ARG002
        """Open further process groups that a strategy needs, on all ranks."""
        return ()

    def total(self, x: Tensor) -> Tensor:
        summed = x.detach().clone()
        dist.all_reduce(summed, group=self.host_group if summed.is_cpu else None)
        return summed

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        return self.total(torch.tensor(numbers, dtype=torch.float64)).tolist()

    def totals_beside(self, numbers: Sequence[float]) -> Sequence[float]:
        summed = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(summed, group=self.publishing)
        return summed.tolist()

    def most(self, count: int) -> int:
        largest = torch.tensor(count)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.host_group)
        return int(largest)

    def gather(self, item: Any) -> list[Any]:
        text = json.dumps(item).encode()
        room = self.most(len(text))
        own = torch.frombuffer(bytearray(text.ljust(room)), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.host_group)
        return [json.loads(bytes(x.tolist())) for x in found]

    def whole(self, rows: Tensor, places: Tensor | slice, count: int) -> Tensor:
        assert isinstance(places, Tensor)
        return self.total(rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows))

    def share(self, groups: Sequence[int], steps: Sequence[int], samples: int = 0) -> Share:
        return share_of(groups, steps, self.rank, self.size, samples, self.totals)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def check_equal(self, sums: dict[str, int]) -> None:
        """ConfigError unless all ranks have the same weights, by integer sums of their bits, which
        do not depend on order."""
        names = list(sums)
        found = self.gather([names, list(sums.values())])
        for rank, (other_names, others) in enumerate(found):
            if other_names != found[0][0]:
                raise ConfigError(
                    f"policy: rank {rank} built other tensors than rank 0; build it from the settings alone"
                )
            for name, a, b in zip(names, found[0][1], others, strict=True):
                if a != b:
                    raise ConfigError(
                        f"policy: rank {rank} built another {name} than rank 0; draw it from the seed alone"
                    )


def add_bit_sums(policy: nn.Module, part: nn.Module, sums: dict[str, int]) -> dict[str, int]:
    """Add the sums of a module's unsharded parameters to `sums`, by their names in the policy;
    returns all of `sums`."""
    own = {id(p) for p in part.parameters()}
    for name, p in policy.named_parameters():
        if id(p) in own and not is_sharded(p):
            size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[p.element_size()]
            sums[name] = int(p.detach().contiguous().view(size).sum(dtype=torch.int64))
    return sums


def _backend(store: Store, rank: int, size: int, device: torch.device) -> str:
    """Backend of the process group, the same on all ranks: NCCL for device tensors, if each has a GPU of its own, by
    the GPU's uuid, which no other host's has."""
    store.set(f"gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "")
    gpus = {bytes(store.get(f"gpu/{other}")) for other in range(size)}
    if b"" in gpus:
        return "gloo"
    return "cpu:gloo,cuda:nccl" if len(gpus) == size else "cpu:gloo,cuda:gloo"


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

    @property
    def read(self) -> Sequence[int]:
        return self.own if self.borrowed is None else (self.borrowed,)

    def collate(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
        packed = collate([trajectories[i] for i in self.read])
        if self.borrowed is None:
            return packed
        return replace(packed, valid=torch.zeros_like(packed.valid))

    def pick(self, index: Tensor) -> tuple[Tensor, Tensor | slice]:
        at = (self.owner[index] == self.rank).nonzero().squeeze(1)
        return self.place[index[at]], at

    def minibatch(self, batch: TrainingBatch, index: Tensor, limits: MicroBatchLimits) -> MiniBatch:
        rows, places = self.pick(index)
        own = batch.take(rows)
        sizes = limits.sizes(len(rows), own.obs, own.forward_inputs)
        if limits.tokens:  # known only to each rank
            own_count = [len(sizes) * (rank == self.rank) for rank in range(self.ranks)]
            counts = [int(count) for count in self.totals(own_count)]
        else:
            counts = self.micro_steps(index, limits.steps)
        missing = [max(counts) - count for count in counts]
        lacking = missing[self.rank]
        padding = [batch.take(torch.tensor([0])).masked()] * lacking if lacking else ()
        return MiniBatch(own, places, len(index), sizes, padding, sum(missing) / (max(counts) * len(counts)))

    def micro_steps(self, index: Tensor, size: int) -> list[int]:
        """Each rank's number of micro-batches of at most `size` chunk steps (0: one) in a mini-batch."""
        counts = torch.bincount(self.owner[index], minlength=self.ranks).tolist()
        return [-(-count // size) if size else min(count, 1) for count in counts]


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
