"""Constant tensors of a policy, cached by device, and a search for tensors that are neither parameters nor buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

#: Attributes in which a module keeps its registered parts.
_REGISTERED = ("_parameters", "_buffers", "_modules")
#: Maximum depth of the search in nested attributes.
_DEPTH = 3

#: Remedy, for the error message.
FIX = "give it to self.register_buffer(name, tensor, persistent=False) of its module"


def plain_tensors(policy: nn.Module) -> dict[str, Tensor]:
    """Unregistered tensors by path, in attributes of all modules, and in lists, dicts and objects there."""
    registered = {id(x) for x in (*policy.parameters(), *policy.buffers())}
    found: dict[str, Tensor] = {}
    for path, module in policy.named_modules():
        for name, value in vars(module).items():
            if name not in _REGISTERED:
                found |= _within(value, f"{path}.{name}" if path else name, _DEPTH)
    return {path: x for path, x in found.items() if id(x) not in registered}


def _within(value: Any, path: str, depth: int) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {path: value}
    if depth == 0 or isinstance(value, (nn.Module, type, ModuleType, FunctionType)):
        return {}
    found: dict[str, Tensor] = {}
    for name, inner in _members(value):
        found |= _within(inner, f"{path}{name}", depth - 1)
    return found


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", x) for key, x in value.items())
    elif isinstance(value, (list, tuple, set)):
        yield from ((f"[{place}]", x) for place, x in enumerate(value))
    else:
        names = (*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", ()))
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


P = ParamSpec("P")
T = TypeVar("T")

_KEEPS = ContextVar("_KEEPS", default=True)


@contextmanager
def nothing_kept() -> Iterator[None]:
    """Disable caching and ignore cached values in this block, for passes on temporary tensors."""
    before = _KEEPS.set(False)
    try:
        yield
    finally:
        _KEEPS.reset(before)


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """Cache `make` by its arguments; results are never freed, since a captured pass reads them."""
    remembered = cache(make)

    @wraps(make)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return remembered(*args, **kwargs) if _KEEPS.get() else make(*args, **kwargs)  # type: ignore[arg-type]

    return call
