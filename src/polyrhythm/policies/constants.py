"""Keeps tensors that are functions of plain numbers, so that every pass reads the same ones at the same addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_KEEPS = ContextVar("_KEEPS", default=True)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Within it nothing is kept, and nothing is met that was: for passes on tensors that are of use there alone."""
    before = _KEEPS.set(False)
    try:
        yield
    finally:
        _KEEPS.reset(before)


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """`make`, called once for the same arguments; what it returns is never freed, since a captured pass reads it."""
    remembered = cache(make)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return remembered(*args, **kwargs) if _KEEPS.get() else make(*args, **kwargs)  # type: ignore[arg-type]

    return call
