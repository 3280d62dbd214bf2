"""Ranks that have all weights each, with torch's DDP.

Parameters may be without gradient: the actor's while the critic warms up, those of a task that no row of a mini-batch
has, or what a policy has and does not use. DDP itself looks for such by a walk through the graph, in every step. Here
its graph reaches every parameter in any case, so that it never waits for one; which got a gradient is noted as they get
it, and summed over the ranks with the last gradients. Afterwards those that got none on any rank have none, as on one
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from polyrhythm.plugins.ranks.collectives import ProcessRanks, add_bit_sums
from polyrhythm.training.checkpoint import Saved, Saving, save_file

#: What tells DDP to leave buffers alone: torch 2.13 has renamed it.
_SYNCS_BUFFERS = "forward_sync_buffers"
if _SYNCS_BUFFERS not in signature(DistributedDataParallel).parameters:
    _SYNCS_BUFFERS = "broadcast_buffers"


class ReplicatedRanks(ProcessRanks):
    """See `training.ranks.Ranks`; what is not sharded is its own part."""

    divides = False
    _step: ReplicatedStep | None = None

    def wrap(self, step: nn.Module) -> nn.Module:
        policy = step.policy
        assert isinstance(policy, nn.Module)
        self.check_equal(add_bit_sums(policy, policy, {}))
        self._step = ReplicatedStep(step)
        wrapped = DistributedDataParallel(
            self._step,
            gradient_as_bucket_view=True,
            init_sync=False,
            **{_SYNCS_BUFFERS: False},  # type: ignore[arg-type]
        )
        wrapped.register_comm_hook(self._step, sum_bucket)
        return wrapped

    def shard(self, policy: nn.Module) -> None:
        pass

    @contextmanager
    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> Iterator[None]:
        assert isinstance(wrapped, DistributedDataParallel)
        with wrapped.module.reducing(last=last, counts=counts), nullcontext() if last else wrapped.no_sync():
            yield

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
        return save_file(state, path, background=background) if self.rank == 0 else Saved()

    def buffers(self) -> list[Tensor]:
        return [] if self._step is None else list(self._step.buckets)


class ReplicatedStep(nn.Module):
    """The step, with a loss of which every trained parameter is a part.

    Its calls give a named tuple with `total`, the loss. buckets: the memory in which DDP has summed the last gradients.
    """

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step
        self.buckets: list[Tensor] = []
        self._trained = trained = [p for p in step.parameters() if p.requires_grad]
        # Its gradient is the notes of this rank: DDP sums them as it sums gradients.
        self._notes = nn.Parameter(torch.zeros(len(trained), dtype=trained[0].dtype, device=trained[0].device))
        self._reached: set[int] = set()  # in this optimizer step on this rank
        self._counts = True
        for place, p in enumerate(self._trained):
            p.register_hook(self._note(place))

    def forward(self, *arguments: Any) -> NamedTuple:
        # What the forward pass begins with, the backward pass comes to last: so DDP puts it into its last bucket.
        notes = self._notes.view_as(self._notes)
        loss = self.step(*arguments)
        reached: Tensor = _ReachAll.apply(loss.total, notes, *self._trained)  # type: ignore[no-untyped-call]
        return loss._replace(total=reached)  # type: ignore[no-any-return]

    @contextmanager
    def reducing(self, *, last: bool, counts: bool) -> Iterator[None]:
        """The context of one micro-step. last: DDP sums gradients in it. counts: its gradients are those of one rank;
        otherwise they are zeros, of parameters that may be none of this mini-batch's."""
        self.buckets.clear()  # before the second step DDP replaces them, and both would be there
        self._counts = counts
        yield
        if last:
            self._drop_unreached()

    def tell_reached(self, last: GradBucket) -> None:
        """Have it summed over ranks which parameters got a gradient: within the last bucket, which is about to be
        summed, where the host can read that without a wait for a device, else beside it."""
        reached = torch.tensor([float(place in self._reached) for place in range(len(self._trained))])
        self._ranks, self._told = reached, None
        for p, gradient in zip(last.parameters(), last.gradients(), strict=True):
            if p is self._notes and gradient.is_cpu:
                self._ranks = gradient.copy_(reached)
                return
        self._told = dist.all_reduce(reached, async_op=True)

    def _note(self, place: int) -> Callable[[Tensor | None], None]:
        def note(gradient: Tensor | None) -> None:
            if self._counts and gradient is not None:
                self._reached.add(place)

        return note

    def _drop_unreached(self) -> None:
        """No gradient where no rank had one in any micro-step, rather than zeros: the optimizer leaves it alone."""
        if self._told is not None:
            self._told.wait()
        for p, ranks in zip(self._trained, self._ranks.tolist(), strict=True):
            if not ranks:
                p.grad = None
        self._notes.grad = None
        del self._ranks  # it may lie in a bucket, which DDP replaces before the second step
        self._reached.clear()


def sum_bucket(step: ReplicatedStep, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook: sums over ranks, as losses are divided by the normaliser of all ranks already."""
    step.buckets.append(bucket.buffer())
    if bucket.is_last():  # so every parameter has its gradient
        step.tell_reached(bucket)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


sum_bucket.__annotations__.clear()  # torch compares them with its classes, not with their names


class _ReachAll(torch.autograd.Function):
    """The loss as it is; its backward pass comes to every parameter, with nothing."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *[None] * ctx.count
