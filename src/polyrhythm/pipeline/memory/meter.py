"""Counts the bytes of tensors that torch's operations hold at a time: of real tensors, or of tensors without memory.

Not seen: what a kernel allocates and frees inside itself, and how an allocator rounds and fragments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class Meter:
    """Counts storages that operations make. live: bytes that are held now; peak: at most so far.

    given: tensors that were there before, which do not count; they must outlive the meter.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        for tensor in given:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    def note(self, result: object) -> None:
        """Count what an operation returned."""
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    size = storage.nbytes()
                    self._known[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))
                    self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int, _: object) -> None:
        self.live -= size
        del self._known[key]


class _RealMode(TorchDispatchMode):
    """Runs operations as usual and counts what they make."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False spares the import of torch's compiler, which takes seconds; nothing is compiled within."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.note(result)
        return result


@contextmanager
def real_meter(given: Iterable[Tensor]) -> Iterator[Meter]:
    """Count the operations within on real tensors."""
    meter = Meter(given)
    with _RealMode(meter):
        yield meter


class FakeMode(FakeTensorMode):
    """Runs operations on tensors that have a device, a shape and a dtype, and no memory, at any size.

    The first operation within imports torch's compiler, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._meter: Meter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self._meter is not None:
            self._meter.note(result)
        return result

    @contextmanager
    def meter(self, given: Iterable[Tensor]) -> Iterator[Meter]:
        """Count the operations within."""
        with self:
            self._meter = Meter(given)
            try:
                yield self._meter
            finally:
                self._meter = None

    def take(self, module: nn.Module) -> None:
        """Give the module's parameters and buffers, on whatever device, this mode's tensors on the CPU."""
        with self:
            module._apply(lambda x: torch.empty(x.shape, dtype=x.dtype))


@contextmanager
def gradients_dropped(module: nn.Module) -> Iterator[None]:
    """Within it each parameter's gradient is dropped as soon as it is complete: it is not an activation."""
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
