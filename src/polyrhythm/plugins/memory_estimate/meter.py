"""Counts the bytes of tensors that torch operations hold at a time, for real tensors or tensors without memory.

Limit: memory that a kernel allocates and frees internally, and the allocator's rounding and fragmentation, are not
seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Cause of the release of a gradient that `gradients_dropped` drops.
DROPPED = object()


class Meter:
    """Counts the storages that operations create. changes: bytes of each creation (positive) or release, in order;
    causes: the creating operation, None for a release or DROPPED for that of a gradient, while dropping is set.

    given: existing tensors, which do not count; they must outlive the meter.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.changes: list[int] = []
        self.causes: list[object] = []
        self.over = self.dropping = False
        self._known: dict[int, Any] = {}
        for tensor in given:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    def note(self, operation: object, result: object) -> None:
        """Count the result of an operation."""
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    size = storage.nbytes()
                    self._known[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))
                    self.changes.append(size)
                    self.causes.append(operation)

    def _forget(self, key: int, size: int, _: object) -> None:
        if not self.over:
            self.changes.append(-size)
            self.causes.append(DROPPED if self.dropping else None)
        del self._known[key]

    @property
    def peak(self) -> int:
        """Maximum number of bytes held at a time."""
        return int(_levels(self.changes).max())


class PassProfile:
    """The peak of a pass for any number of rows, from the changes of two passes.

    A pass runs the same operations for any number of rows, and each tensor's size is affine in the rows. So the bytes
    held after each operation are an affine function of the rows, and the peak is their maximum. Where the operations of
    the two passes differ (images are resized a few rows at a time), the line through the peaks of that section is used.

    with_gradients: gradients count, each from its creation on.
    """

    def __init__(self, few: tuple[int, Meter], more: tuple[int, Meter], *, with_gradients: bool = False) -> None:
        self._rows, distance = few[0], more[0] - few[0]
        begin, end = _alike(few[1].causes, more[1].causes)
        kept = DROPPED if with_gradients else self
        changes = [
            [0 if cause is kept else size for size, cause in zip(meter.changes, meter.causes, strict=True)]
            for _, meter in (few, more)
        ]
        levels = [_with_one_stretch(_levels(own), begin, end) for own in changes]
        self._at, self._per_row = levels[0], (levels[1] - levels[0]) / distance

    def peak(self, rows: int) -> int:
        """Maximum bytes of a pass with this many rows; 0 for none."""
        return max(0, int((self._at + (rows - self._rows) * self._per_row).max())) if rows else 0


def _alike(few: Sequence[object], more: Sequence[object]) -> tuple[int, int]:
    """Number of equal entries at the beginning, and of equal ones among the rest at the end."""
    shorter = min(len(few), len(more))
    begin = next((i for i in range(shorter) if few[i] is not more[i]), shorter)
    end = next((i for i in range(shorter - begin) if few[-1 - i] is not more[-1 - i]), shorter - begin)
    return begin, end


def _with_one_stretch(levels: NDArray[np.int64], begin: int, end: int) -> NDArray[np.int64]:
    """The levels with the section between the first `begin` and the last `end` changes replaced by its maximum."""
    last = len(levels) - end
    stretch = levels[begin : last + 1].max(keepdims=True)
    return np.concatenate((levels[: begin + 1], stretch, levels[last:]))


def _levels(changes: Sequence[int]) -> NDArray[np.int64]:
    """Bytes held initially and after each change."""
    return np.cumsum([0, *changes], dtype=np.int64)


class _RealMode(TorchDispatchMode):
    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False avoids importing torch's compiler, which takes seconds; nothing is compiled inside."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.note(func, result)
        return result


@contextmanager
def real_meter(given: Iterable[Tensor]) -> Iterator[Meter]:
    """Count operations on real tensors inside the context."""
    meter = Meter(given)
    with _RealMode(meter), _measured(meter):
        yield meter


@contextmanager
def _measured(meter: Meter) -> Iterator[None]:
    """Disable Python's garbage collector, which frees at varying times; releases after the context do not count."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        meter.over = True


class FakeMode(FakeTensorMode):
    """Runs operations on tensors with device, shape and dtype but without memory.

    The first operation imports torch's compiler, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._meter: Meter | None = None
        self._inner = False  # inside an operation that torch decomposes for its result's shape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False avoids a wrapper around each operation; nothing is compiled inside."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self._inner = not self._inner, True
        try:
            result = self.dispatch(func, types, args, kwargs or {})
        finally:
            self._inner = not outer
        if outer and self._meter is not None:
            self._meter.note(func, result)
        return result

    @contextmanager
    def meter(self, given: Iterable[Tensor]) -> Iterator[Meter]:
        """Count operations inside the context."""
        with self:
            self._meter = Meter(given)
            try:
                with _measured(self._meter):
                    yield self._meter
            finally:
                self._meter = None

    def take(self, module: nn.Module) -> None:
        """Replace the module's parameters and buffers, on any device, by this mode's CPU tensors."""
        with self:
            module._apply(lambda x: torch.empty(x.shape, dtype=x.dtype))


@contextmanager
def gradients_dropped(module: nn.Module, meter: Meter) -> Iterator[None]:
    """Inside the context each parameter's gradient is dropped when complete, because it is not an activation."""

    def drop(parameter: Tensor) -> None:
        meter.dropping = True
        parameter.grad = None
        meter.dropping = False

    hooks = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
