"""Networks without memory for their weights, whose constants are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

#: Factories whose values no constructor relies on: they are overwritten, or drawn.
_DRAWN = frozenset((torch.empty, torch.empty_strided, torch.rand, torch.randn, torch.normal))
#: Factories of one repeated value: weights if they are large, constants if not.
_REPEATED = frozenset((torch.zeros, torch.ones))
_LARGE = 1 << 16


class _WeightsOnMeta(TorchFunctionMode):
    """Puts what a constructor allocates or draws on the meta device, large zeros and ones too, and computes everything
    else as usual.

    So weights take neither memory nor time, while constants made from numbers (frequencies, tables, scales) are right
    whether they are in the state_dict or not.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWN:
            return func(*args, **{**kwargs, "device": "meta"})
        if func in _REPEATED and prod(shape := _shape_of(args, kwargs)) > _LARGE:
            return torch.empty(shape, dtype=kwargs.get("dtype"), device="meta")
        first = args[0] if args else kwargs.get("tensor")  # by name in torch.nn.init
        if isinstance(first, Tensor) and first.is_meta and _only_fills(func):
            return first
        return func(*args, **kwargs)


def _shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """The shape that torch.zeros or torch.ones is called with."""
    if "size" in kwargs:
        return tuple(kwargs["size"])
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args


def _only_fills(func: Any) -> bool:
    """Whether it writes values into its first argument and returns that."""
    name = getattr(func, "__name__", "")
    return getattr(func, "__module__", "") == "torch.nn.init" or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Within it, modules are made without memory for their weights; their constants are real."""
    with torch.random.fork_rng(devices=[]), _WeightsOnMeta():
        yield
