"""The ranks of a trainer: processes that train one policy together. A single rank does not communicate.

Several ranks come from a plugin of kind `ranks`, by `placement.trainer.strategy`: a subclass of `Ranks` with the
constructor (rank, size, meeting, device, shard), as described in `open_ranks`, which joins the other ranks. Then all
methods with an argument are collective: all ranks call them, in the same order and from one thread
(docs/design/training-and-objectives.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

from polyrhythm.plugin import load
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import PackedBatch, Share, collate, sample_counts
from polyrhythm.training.checkpoint import Saving, save_file

if TYPE_CHECKING:
    import torch

    from polyrhythm.config.sections.placement import ShardSettings

#: replicate: every rank has all weights; shard: every rank has a part of each tensor.
Strategy = Literal["replicate", "shard"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the ranks of one incarnation find each other.

    file: in the run's folder on this host, used by this incarnation alone: all ranks create it if they are on one host,
    else rank 0 does. hosts: of each rank. address: by which the other ranks reach this one, "" if all have the same.
    find: the content of rank 0's file, b"" while it is not there. by: by when all have to be there, on the monotonic
    clock.
    """

    file: Path
    hosts: Sequence[str] = ()
    address: str = ""
    find: Callable[[], bytes] = bytes
    by: float = math.inf


class Piece(NamedTuple):
    """Rows of a published tensor that one process has. first: the row of the whole tensor that they begin at; None: it
    is the whole tensor."""

    name: str
    rows: Tensor
    first: int | None = None


class Ranks:
    """Communication of this process, rank 0..size-1, with the other ranks of its trainer; here of a single one.

    device: on which this rank computes; None for a single rank, whose policy determines it. divides: no rank has the
    weights whole, so that publishing and saving them need all ranks.
    """

    rank, size = 0, 1
    device: torch.device | None = None
    divides = False

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, of the same shape and device (host or this rank's);
        `x` itself for one rank."""
        return x

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        """Each of the numbers summed over all ranks."""
        return numbers

    def totals_beside(self, numbers: Sequence[float]) -> Sequence[float]:
        """As `totals`, over connections of its own: for one thread beside the one that calls the other methods."""
        return numbers

    def most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        return count

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks, by rank: JSON-able data."""
        return [item]

    def whole(self, rows: Tensor, places: Tensor | slice, count: int) -> Tensor:  # noqa: ARG002
        """Rows [n,...] of every rank at their distinct places [n] in one tensor [count,...], on all ranks. places:
        int64; a slice for a single rank, which has all rows."""
        return rows

    def share(self, groups: Sequence[int], steps: Sequence[int], samples: int = 0) -> Share:  # noqa: ARG002
        """This rank's share of the trajectories with these groups and chunk steps. Needs no communication. samples:
        trajectories per mini-batch (0: all in one). Groups stay whole."""
        return Share(sum(steps), len(steps), sample_counts(steps, samples))

    def wrap(self, step: nn.Module) -> nn.Module:
        """A module whose forward pass gives a micro-batch's loss and whose backward pass sums gradients over all ranks.

        `step.policy` is the policy, equal on every rank. With shard its parameters are replaced in place by their
        shards (DTensors) on `device`, so optimizers must be made afterwards. It may be on the host, or have tensors
        that are still to be read (`load_part`): block after block is read, moved to the device and sharded.
        ConfigError: the ranks have different weights, or a tensor cannot be sharded.
        """
        return step

    def shard(self, policy: nn.Module) -> None:
        """Shard the parameters of another, untrained policy in place; nothing with another strategy."""

    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        """Context of the forward and backward pass of one micro-step. last: of its optimizer step. counts: a
        single rank would do this micro-step too; otherwise all its entries are masked, and its zero
        gradients count as none."""
        return nullcontext()

    def part(self, x: Tensor, like: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """This rank's part of `x`, on its memory; `x` itself without sharding. Needs no communication. like: sharding
        of a whole `x`; a sharded `x` has its own."""
        return x

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """`part` of each tensor; all or none are sharded."""
        return tensors

    def join(self, part: Tensor, like: Tensor) -> Tensor:  # noqa: ARG002
        """The tensor of which `part` is this rank's part, sharded like `like`; `part` itself if that is not sharded.
        Needs no communication."""
        return part

    def norms(self, each: Tensor) -> Tensor:
        """Norms [P] of the whole gradients from the norms [P] of this rank's parts."""
        return each

    def snapshot(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, in order, one at a time: a sharded one is whole only until the next. Every rank must
        iterate over all of them."""
        yield from state.items()

    def divide_writing(self, state: Mapping[str, Tensor], memory: str) -> bool:  # noqa: ARG002
        """Decide which ranks write which rows of these tensors, so that those whose `memory` has the same name as rank
        0's write every row once; whether they have all rows. memory: where this rank would write, "" for nowhere."""
        return False

    def pieces(self, state: Mapping[str, Tensor]) -> list[Piece]:
        """What this rank writes, after `divide_writing`: rows on its memory, which change with the weights. Needs no
        communication."""
        return [Piece(name, tensor) for name, tensor in state.items()]

    def save(self, state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:
        """Save a learner's state: in a file written by rank 0, or, if sharded, in a folder written in the background.
        background: write a file in the background too, from a copy. OSError: cannot write."""
        return save_file(state, path, background=background)

    def buffers(self) -> list[Tensor]:
        """Device memory kept between updates: DDP's gradient buckets."""
        return []

    def close(self) -> None:
        """Leave the other ranks without waiting; collectives are no longer possible."""


ONE_RANK = Ranks()


def open_ranks(
    rank: int,
    size: int,
    meeting: Meeting,
    device: str,
    strategy: Strategy = "replicate",
    shard: ShardSettings | None = None,
) -> Ranks:
    """Join the other ranks of this trainer; returns once all have joined. `ONE_RANK` if size is 1.

    device: of this rank, cpu or cuda:N. StartError: not all have come in time, or they cannot reach each other; the
    message has which. PluginError: no plugin has this strategy.
    """
    if size == 1:
        return ONE_RANK
    ranks: Ranks = load("ranks", strategy)(rank, size, meeting, device, shard)
    return ranks


def take_share(trajectories: Sequence[Trajectory], ranks: Ranks, samples: int = 0) -> tuple[Share, PackedBatch]:
    """This rank's share of an update's trajectories, collated; no other trajectories are read. A rank without any gets
    a sample of another, with all entries masked. samples: as in `Ranks.share`."""
    steps = [t.steps for t in trajectories]
    if not steps or min(steps) == 0:
        collate(trajectories)  # refuses them
    share = ranks.share([t.group for t in trajectories], steps, samples)
    return share, share.collate(trajectories)
