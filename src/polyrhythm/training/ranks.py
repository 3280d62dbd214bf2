"""The ranks of a trainer: processes that train one policy together. One rank is the trivial case of the same code.

Only what is behind this module communicates: `training.distributed`, which it loads for several ranks, with
`replicas` and `sharding`, and `sharded_checkpoint` in its own thread. All methods with an argument
are collective where there are several ranks: all of them call it, in the same order and from one thread
(docs/design/training-and-objectives.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    import torch

    from polyrhythm.config.sections.placement import ShardSettings


#: Types of tensors that are not sharded, so that the usual answer costs next to nothing.
_WHOLE = (Tensor, torch.nn.Parameter)


def is_sharded(x: Tensor) -> bool:
    """Whether it is a DTensor."""
    return type(x) not in _WHOLE and hasattr(x, "to_local")


def part_of(x: Tensor, like: Tensor | None = None) -> Tensor:
    """This rank's part of `x`, on its memory. like: how a whole `x` would be sharded; a sharded one is anyhow."""
    if is_sharded(x):
        with torch.no_grad():
            return x.to_local()  # type: ignore[attr-defined, no-any-return]
    if like is None or not is_sharded(like):
        return x
    mesh, (placement,) = like.device_mesh, like.placements  # type: ignore[attr-defined]
    pieces = x.chunk(mesh.size(), dim=placement.dim)
    rank = mesh.get_local_rank()
    return pieces[rank] if rank < len(pieces) else x.narrow(placement.dim, 0, 0)


def parts_of(tensors: list[Tensor]) -> list[Tensor]:
    """`part_of` each, of which all are sharded or none is."""
    return [part_of(x) for x in tensors] if tensors and is_sharded(tensors[0]) else tensors


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which `part` is this rank's part, sharded like `like`; `part` itself where that is not sharded."""
    if not is_sharded(like):
        return part
    make: Any = type(like) if not isinstance(like, torch.nn.Parameter) else type(like.data)
    spec: Any = like._spec  # type: ignore[attr-defined]
    return make(part, spec, requires_grad=False)  # type: ignore[no-any-return] # from_local would move an offloaded part


@torch.no_grad()
def fill(own: Tensor, x: Tensor) -> None:
    """Overwrite a tensor with `x`, which is whole, or sharded like it. ValueError: it has another shape."""
    if own.shape != x.shape:
        raise ValueError(f"the shape is {list(x.shape)}, it should be {list(own.shape)}")
    part_of(own).copy_(part_of(x, own))


#: replicate: every rank has all weights; shard: every rank has a part of each tensor.
Strategy = Literal["replicate", "shard"]


class Ranks(Protocol):
    """This process among the ranks of its trainer: rank in 0..size-1."""

    rank: int
    size: int
    strategy: Strategy
    background: Any
    """torch's group of the same ranks for the collectives of another thread, which saves; None for one rank."""

    @property
    def device(self) -> torch.device | None:
        """Where this rank computes; None for one rank: where its policy is."""
        ...

    @property
    def divides(self) -> bool:
        """Whether no rank has the weights whole, so that publishing and saving them need all ranks."""
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

    def norms(self, each: Tensor) -> Tensor:
        """Norms [P] of this rank's parts of P gradients → those of the whole gradients."""
        ...

    def snapshot(self, state: Mapping[str, Tensor], names: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by name, in the order of `names` (all of `state` where none are given), one at a time: a
        sharded one exists whole only until the next. Every rank goes through all of it."""
        ...

    def buffers(self) -> list[Tensor]:
        """What it keeps on the device from one update to the next, once one was trained: the room for gradients that
        DDP sums."""
        ...

    def close(self) -> None:
        """Leave the others; collectives are no longer possible. Waits for nobody."""
        ...


class OneRank:
    """A trainer of one process: nothing is sent."""

    rank, size = 0, 1
    strategy: Strategy = "replicate"
    device = background = None
    divides = False

    def total(self, x: Tensor) -> Tensor:
        return x

    def totals(self, numbers: Sequence[float]) -> Sequence[float]:
        return numbers

    def most(self, count: int) -> int:
        return count

    def gather(self, item: Any) -> list[Any]:
        return [item]

    def wrap(self, step: nn.Module) -> nn.Module:
        return step

    def shard(self, policy: nn.Module) -> None:
        pass

    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def norms(self, each: Tensor) -> Tensor:
        return each

    def snapshot(self, state: Mapping[str, Tensor], names: Iterable[str] = ()) -> Iterator[tuple[str, Tensor]]:
        for name in tuple(names) or state:
            yield name, state[name]

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

    store: a file in the run's private folder, of this incarnation alone (torch's FileStore makes it). device: of this
    rank, cpu or cuda:N. Host tensors go over gloo by the loopback interface, device tensors over NCCL where every rank
    has a GPU of its own, else over gloo. There is no deadline: supervision ends a process that waits too long.
    """
    if size == 1:
        return ONE_RANK
    from polyrhythm.training.distributed import ProcessRanks  # torch.distributed is only for several ranks

    return ProcessRanks(rank, size, store, device, strategy, shard)


def whole_from(ranks: Ranks, rows: Tensor, places: Tensor | slice, count: int) -> Tensor:
    """Rows [n,...] of every rank at their places [n] (int64; a slice for one rank, which has all) in one tensor
    [count,...], which all ranks get; no place is taken twice."""
    if isinstance(places, slice):
        return rows
    return ranks.total(rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows))
