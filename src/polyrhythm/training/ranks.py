"""The ranks of a trainer: processes that train one policy together. One rank, which is here, sends nothing.

Several come from a plugin of kind `ranks`, by `placement.trainer.strategy`: a class that is made with
(rank, size, store, device, shard), as `open_ranks` describes them, and has joined the other ranks once it is made.
All methods with an argument are collective where there are several ranks: all of them call it, in the same order and
from one thread (docs/design/training-and-objectives.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from polyrhythm.plugin import load
from polyrhythm.specs import Trajectory
from polyrhythm.training.batch import PackedBatch, collate
from polyrhythm.training.checkpoint import Saving, save_file
from polyrhythm.training.micro_batches import Share, sample_counts

if TYPE_CHECKING:
    import torch

    from polyrhythm.config.sections.placement import ShardSettings

#: replicate: every rank has all weights; shard: every rank has a part of each tensor.
Strategy = Literal["replicate", "shard"]


class Ranks(Protocol):
    """This process among the ranks of its trainer: rank in 0..size-1."""

    rank: int
    size: int
    divides: bool
    """Whether no rank has the weights whole, so that publishing and saving them need all ranks."""

    @property
    def device(self) -> torch.device | None:
        """Where this rank computes; None for one rank: where its policy is."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, shaped like it, on its device (host or this rank's); `x` itself for one."""
        ...

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        """Each of the numbers summed over all ranks."""
        ...

    def most(self, count: int) -> int:
        """The largest `count` of all ranks."""
        ...

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks by rank: text, numbers, lists and dicts of them, as JSON has them."""
        ...

    def whole(self, rows: Tensor, places: Tensor | slice, count: int) -> Tensor:
        """Rows [n,...] of every rank at their places [n] (int64; a slice for one rank, which has all) in one tensor
        [count,...], which all ranks get; no place is taken twice."""
        ...

    def share(self, groups: Sequence[int], steps: Sequence[int], samples: int = 0) -> Share:
        """This rank's share of the trajectories with these groups and chunk steps, in mini-batches of so many samples
        (0: all in one). Groups stay whole; nothing is sent."""
        ...

    def wrap(self, step: nn.Module) -> nn.Module:
        """The module whose forward pass gives a micro-batch's loss, so that its backward pass sums gradients over all
        ranks. `step.policy` is the policy, the same on every rank; with shard its parameters are replaced in place by
        their shards (DTensors) on `device`, so optimizers are made afterwards. It may be on the host, or have tensors
        that are still to be read (`load_part`): one block after another is read, brought to the device and divided.
        ConfigError: the ranks have other weights, or a tensor cannot be sharded."""
        ...

    def shard(self, policy: nn.Module) -> None:
        """Shard the parameters of one more policy in place, which is not trained; nothing with another strategy."""
        ...

    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> AbstractContextManager[None]:
        """The context of forward and backward pass of one micro-step of an optimizer step. last: its last one. counts:
        one rank would do it, too; otherwise all its entries are masked, and a gradient that it gives is none."""
        ...

    def part(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """This rank's part of `x`, on its memory; `x` itself where nothing is sharded. like: how a whole `x` would be
        sharded; a sharded one is anyhow. Nothing is sent."""
        ...

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        """`part` of each, of which all are sharded or none is."""
        ...

    def join(self, part: Tensor, like: Tensor) -> Tensor:
        """The tensor of which `part` is this rank's part, sharded like `like`; `part` itself where that is not.
        Nothing is sent."""
        ...

    def norms(self, each: Tensor) -> Tensor:
        """Norms [P] of this rank's parts of P gradients → those of the whole gradients."""
        ...

    def snapshot(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, in their order, one at a time: a sharded one exists whole only until the next. Every
        rank goes through all of it."""
        ...

    def save(self, state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:
        """Save the state of a learner: in a file that rank 0 writes, or where it is sharded in a folder, in the
        background. background: a file is written in the background, too, from a copy. OSError: cannot write."""
        ...

    def buffers(self) -> list[Tensor]:
        """What it keeps on the device from one update to the next, once one was trained: the room for gradients that
        DDP sums."""
        ...

    def close(self) -> None:
        """Leave the others; collectives are no longer possible. Waits for nobody."""
        ...


class OneRank:
    """A trainer of one process: nothing is sent, nothing is sharded."""

    rank, size, divides, device = 0, 1, False, None

    def total(self, x: Tensor) -> Tensor:
        return x

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers

    def most(self, count: int) -> int:
        return count

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def whole(self, rows: Tensor, places: Tensor | slice, count: int) -> Tensor:  # noqa: ARG002
        return rows

    def share(self, groups: Sequence[int], steps: Sequence[int], samples: int = 0) -> Share:  # noqa: ARG002
        return Share(sum(steps), len(steps), sample_counts(steps, samples))

    def wrap(self, step: nn.Module) -> nn.Module:
        return step

    def shard(self, policy: nn.Module) -> None:
        pass

    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def part(self, x: Tensor, like: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return x

    def parts(self, tensors: list[Tensor]) -> list[Tensor]:
        return tensors

    def join(self, part: Tensor, like: Tensor) -> Tensor:  # noqa: ARG002
        return part

    def norms(self, each: Tensor) -> Tensor:
        return each

    def snapshot(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield from state.items()

    def save(self, state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:
        return save_file(state, path, background=background)

    def buffers(self) -> list[Tensor]:
        return []

    def close(self) -> None:
        pass


ONE_RANK: Ranks = OneRank()


def open_ranks(
    rank: int,
    size: int,
    store: Path,
    device: str,
    strategy: Strategy = "replicate",
    shard: ShardSettings | None = None,
) -> Ranks:
    """Join the other ranks of this trainer; returns once all have joined. `ONE_RANK` where size is 1.

    store: a file in the run's private folder, of this incarnation alone, which the ranks make. device: of this rank,
    cpu or cuda:N. There is no deadline: supervision ends a process that waits too long. KeyError: no plugin has this
    strategy.
    """
    if size == 1:
        return ONE_RANK
    ranks: Ranks = load("ranks", strategy)(rank, size, store, device, shard)
    return ranks


def take_share(trajectories: Sequence[Trajectory], ranks: Ranks, samples: int = 0) -> tuple[Share, PackedBatch]:
    """This rank's share of an update's trajectories, which alone are read, collated. A rank without any has a sample of
    another, in which no entry counts. samples: as in `Ranks.share`."""
    steps = [t.steps for t in trajectories]
    if not steps or min(steps) == 0:
        collate(trajectories)  # refuses them
    share = ranks.share([t.group for t in trajectories], steps, samples)
    return share, share.collate(trajectories)
