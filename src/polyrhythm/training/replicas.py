"""A micro-step for DDP, of which parameters may be without gradient: the actor's while the critic warms up, or what a
policy has and does not use.

DDP itself looks for such in every step, and asks the other ranks, which costs a small policy as much as the sum of its
gradients. Here its graph reaches every parameter in any case, so that it never waits for one; which of them have no
gradient on any rank is found in the first step of a kind, and afterwards they are left without one, as on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: Numbers of every rank -> their sums over all.
Totals = Callable[[Sequence[float]], Sequence[float]]


class ReplicatedStep(nn.Module):
    """The step, with a loss of which every trained parameter is a part. totals: collective.

    Its calls give a named tuple with `total`, the loss. Calls with equal flags (arguments that are bool) are of a kind.
    """

    def __init__(self, step: nn.Module, totals: Totals) -> None:
        super().__init__()
        self.step, self._totals = step, totals
        self._trained = [p for p in step.parameters() if p.requires_grad]
        self._unused: dict[tuple[bool, ...], list[nn.Parameter]] = {}
        self._kind: tuple[bool, ...] = ()

    def forward(self, *arguments: Any) -> NamedTuple:
        loss = self.step(*arguments)
        self._kind = tuple(x for x in arguments if isinstance(x, bool))
        if torch.is_grad_enabled() and self._kind not in self._unused:
            used = _leaves(loss.total)
            counts = self._totals([float(id(p) in used) for p in self._trained])
            self._unused[self._kind] = [p for p, count in zip(self._trained, counts, strict=True) if not count]
        reached: Tensor = _ReachAll.apply(loss.total, *self._trained)  # type: ignore[no-untyped-call]
        return loss._replace(total=reached)  # type: ignore[no-any-return]

    def drop_unused(self) -> None:
        """After the backward pass in which DDP has summed: no gradient where no rank had one, rather than zero."""
        there = [(p, p.grad.any()) for p in self._unused.get(self._kind, ()) if p.grad is not None]
        some = torch.stack([x for _, x in there]).tolist() if there else []
        for (p, _), has_gradient in zip(there, some, strict=True):
            if not has_gradient:
                p.grad = None


class _ReachAll(torch.autograd.Function):
    """The loss as it is; its backward pass comes to every parameter, with nothing."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *[None] * ctx.count


def _leaves(total: Tensor) -> set[int]:
    """Ids of the parameters that the graph of `total` comes to."""
    seen, found, open_ = set[Any](), set[int](), [total.grad_fn]
    while open_:
        node = open_.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        open_ += [inner for inner, _ in node.next_functions]
    return found
