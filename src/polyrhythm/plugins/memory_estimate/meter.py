"""Counts the bytes of tensors that torch's operations hold at a time: of real tensors, or of tensors without memory.

Not seen: what a kernel allocates and frees inside itself, and how an allocator rounds and fragments.
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


class Meter:
    """Counts storages that operations make. changes: bytes of each that was made (positive) or freed, in this order,
    until it is over; causes: the operation that made it, None where it was freed.

    given: tensors that were there before, which do not count; they must outlive the meter.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.changes: list[int] = []
        self.causes: list[object] = []
        self.over = False
        self._known: dict[int, Any] = {}
        for tensor in given:
            storage = tensor.untyped_storage()
            self._known[id(storage)] = weakref.ref(storage)

    def note(self, operation: object, result: object) -> None:
        """Count what an operation returned."""
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
            self.causes.append(None)
        del self._known[key]

    @property
    def peak(self) -> int:
        """The most bytes that were held at a time."""
        return int(_levels(self.changes).max())


class PassProfile:
    """The peak of a pass for any number of rows, from the changes of two passes.

    A pass does the same operations whatever its rows, and the size of each tensor is a number plus a number per row. So
    what is held after each operation is known for all rows, and the peak is the highest of these lines. Where the two
    passes differ (images are resized a few rows at a time), the line through the peaks of that stretch is taken.
    """

    def __init__(self, few: tuple[int, Meter], more: tuple[int, Meter]) -> None:
        self._rows, distance = few[0], more[0] - few[0]
        begin, end = _alike(few[1].causes, more[1].causes)
        levels = [_with_one_stretch(_levels(meter.changes), begin, end) for _, meter in (few, more)]
        self._at, self._per_row = levels[0], (levels[1] - levels[0]) / distance

    def peak(self, rows: int) -> int:
        """Bytes at most in a pass of so many rows; 0 for none."""
        return max(0, int((self._at + (rows - self._rows) * self._per_row).max())) if rows else 0


def _alike(few: Sequence[object], more: Sequence[object]) -> tuple[int, int]:
    """How many entries are the same at the beginning, and how many of the rest at the end."""
    shorter = min(len(few), len(more))
    begin = next((i for i in range(shorter) if few[i] is not more[i]), shorter)
    end = next((i for i in range(shorter - begin) if few[-1 - i] is not more[-1 - i]), shorter - begin)
    return begin, end


def _with_one_stretch(levels: NDArray[np.int64], begin: int, end: int) -> NDArray[np.int64]:
    """The levels with one number, the highest, for all between the first `begin` and the last `end` changes."""
    last = len(levels) - end
    stretch = levels[begin : last + 1].max(keepdims=True)
    return np.concatenate((levels[: begin + 1], stretch, levels[last:]))


def _levels(changes: Sequence[int]) -> NDArray[np.int64]:
    """Bytes that are held, at first and after each change."""
    return np.cumsum([0, *changes], dtype=np.int64)


class _RealMode(TorchDispatchMode):
    """Runs operations as usual and counts what they make."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False spares the import of torch's compiler, which takes seconds; nothing is compiled within."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._meter.note(func, result)
        return result


@contextmanager
def real_meter(given: Iterable[Tensor]) -> Iterator[Meter]:
    """Count the operations within on real tensors."""
    meter = Meter(given)
    with _RealMode(meter), _measured(meter):
        yield meter


@contextmanager
def _measured(meter: Meter) -> Iterator[None]:
    """Without Python's collector, which frees at other places each time; what is freed after it does not count."""
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
    """Runs operations on tensors that have a device, a shape and a dtype, and no memory, at any size.

    The first operation within imports torch's compiler, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._meter: Meter | None = None
        self._inner = False  # within an operation that torch takes apart to learn its result's shape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False spares a wrapper around each operation; nothing is compiled within."""
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
        """Count the operations within."""
        with self:
            self._meter = Meter(given)
            try:
                with _measured(self._meter):
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
