"""Replicated ranks: each has all weights, with torch's DDP.

Parameters may have no gradient: the actor's while the critic warms up, those of a task without a row in a mini-batch,
or unused ones. DDP itself would search the graph for them in every step. Here its graph always reaches every parameter,
so that it never waits for one; which of them got a gradient is recorded and summed over the ranks with the last
gradients. Afterwards a parameter without a gradient on any rank has none, as on a single rank.
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

#: DDP's option that disables buffer synchronisation, renamed in torch 2.13.
_SYNCS_BUFFERS = "forward_sync_buffers"
if _SYNCS_BUFFERS not in signature(DistributedDataParallel).parameters:
    _SYNCS_BUFFERS = "broadcast_buffers"


class ReplicatedRanks(ProcessRanks):
    """See `training.ranks.Ranks`; nothing is sharded."""

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

    @contextmanager
    def reducing(self, wrapped: nn.Module, *, last: bool, counts: bool) -> Iterator[None]:
        assert isinstance(wrapped, DistributedDataParallel)
        with wrapped.module.reducing(last=last, counts=counts), nullcontext() if last else wrapped.no_sync():
            yield

    def save(self, state: Mapping[str, Any], path: Path, *, background: bool = False) -> Saving:
        return save_file(state, path, background=background) if self.rank == 0 else Saved()

    def buffers(self) -> list[Tensor]:
        return [] if self._step is None else list(self._step.buckets)


class ReplicatedStep(nn.Module):
    """The micro-step, with a loss that depends on every trained parameter. Its calls return a named tuple with `total`,
    the loss. buckets: memory of the last gradients that DDP summed."""

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
        """Context of one micro-step. last: DDP sums gradients in it. counts: its gradients count; otherwise they are
        zeros, of parameters that the mini-batch may not use."""
        self.buckets.clear()  # DDP replaces them before the second step; keeping both would double the memory
        self._counts = counts
        yield
        if last:
            self._drop_unreached()

    def tell_reached(self, last: GradBucket) -> None:
        """Sum over the ranks which parameters got a gradient. Inside the last bucket, which is about to be summed, if
        the host can write it without waiting for a device, else separately."""
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
        """Set gradients to None, not zeros, if no rank had one in any micro-step, so the
        optimizer skips the parameter."""
        if self._told is not None:
            self._told.wait()
        for p, ranks in zip(self._trained, self._ranks.tolist(), strict=True):
            if not ranks:
                p.grad = None
        self._notes.grad = None
        del self._ranks  # it may be a view of a bucket, which DDP replaces before the second step
        self._reached.clear()


def sum_bucket(step: ReplicatedStep, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP hook: sums over ranks, as losses are already divided by the normaliser of all ranks."""
    step.buckets.append(bucket.buffer())
    if bucket.is_last():  # so every parameter has its gradient
        step.tell_reached(bucket)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


sum_bucket.__annotations__.clear()  # torch compares them with its classes, not with their names


class _ReachAll(torch.autograd.Function):
    """Identity on the loss whose backward pass reaches every parameter with a zero gradient."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *[None] * ctx.count
