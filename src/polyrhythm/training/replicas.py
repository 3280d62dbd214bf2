"""A micro-step for DDP, of which parameters may be without gradient: the actor's while the critic warms up, those of a
task that no row of a mini-batch has, or what a policy has and does not use.

DDP itself looks for such by a walk through the graph, in every step. Here its graph reaches every parameter in any
case, so that it never waits for one; which got a gradient is noted as they get it, and summed over the ranks with the
last gradients. Afterwards those that got none on any rank have none, as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket


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
