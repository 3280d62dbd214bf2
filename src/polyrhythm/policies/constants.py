"""Keeps tensors that are functions of plain numbers, so that every pass reads the same ones at the same addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, called once for the same arguments; what it returns is never freed (a captured pass reads it).

    Within a dispatch mode, such as one that runs a policy without memory (`pipeline.memory`), nothing is kept: what is
    made there is of use there alone.
    """
    remembered = cache(make)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch._C._len_torch_dispatch_stack():
            return make(*args, **kwargs)
        return remembered(*args, **kwargs)  # type: ignore[arg-type]

    return call
