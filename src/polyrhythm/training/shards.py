"""This rank's part of a tensor that is sharded over ranks (a DTensor), and back, without communication.

Here is no torch.distributed: a tensor that is not sharded is its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
