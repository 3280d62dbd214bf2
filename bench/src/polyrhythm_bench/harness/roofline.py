"""Counts what a pass must do, and measures what its device can do: the least time that the device allows.

    least time = max(flops / flops per second of a matmul, bytes / bytes per second of a copy)

The peaks are measured in the same run, by a large matrix product and a large copy. Bytes are those of the weights, each
read once, of the inputs and of the outputs; a pass that reads a weight again, such as in every denoise step, or that
writes activations to memory, moves more. So the least time is a bound from below, and no pass reaches it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

_ATEN = torch.ops.aten
#: Operations that read of their first tensor only as much as they give.
_GATHERS = (_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather)
#: Side of the measured matrices and bytes of the measured copy, on a GPU and on a CPU.
_SIDE, _COPY_BYTES = {"cuda": 8192, "cpu": 1024}, {"cuda": 2**30, "cpu": 2**27}
_TRIES = 7


class Peaks(NamedTuple):
    """What a device does at most. flops_per_s: of a matmul; bytes_per_s: read and written by a copy."""

    flops_per_s: float
    bytes_per_s: float

    def least_s(self, flops: int, nbytes: int) -> float:
        """The least time for so much."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


class PassCount(NamedTuple):
    """What one pass does. flops: of its matrix products, convolutions and attention (a multiply-add counts two);
    weight_bytes: of the parameters that it reads, each once, gathered ones by what is gathered; peak_bytes: largest sum
    of the tensors that it allocates and that live at a time, without the workspaces of kernels."""

    flops: int
    weight_bytes: int
    peak_bytes: int


def synchronise(device: torch.device) -> None:
    """Wait for a CUDA device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of one call, the device's work included. On a CPU with one thread it is the thread's CPU time, which other
    programs on the same cores change little."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronise(device)
    begin = clock()
    run()
    synchronise(device)
    return clock() - begin


def measure_peaks(device: torch.device, dtype: torch.dtype) -> Peaks:
    """The best of a few tries each."""
    side, nbytes = _SIDE[device.type], _COPY_BYTES[device.type]
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source).copy_(source)
    torch.matmul(a, b, out=product)
    matmul_s = min(seconds(lambda: torch.matmul(a, b, out=product), device) for _ in range(_TRIES))
    copy_s = min(seconds(lambda: target.copy_(source), device) for _ in range(_TRIES))
    return Peaks(2 * side**3 / matmul_s, 2 * nbytes / copy_s)


def count(run: Callable[[], object], parameters: Iterable[Tensor]) -> PassCount:
    """What one call does; it takes longer than usual."""
    flops = FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION)
    memory = _Memory(parameters)
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # torch.nn's fused layers have no formula
    try:
        with flops, memory:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    return PassCount(int(flops.get_total_flops()), sum(memory.read.values()), memory.peak)


class _Memory(TorchDispatchMode):
    """read: bytes read of each parameter, by its storage; peak: most bytes of new storages that lived at a time."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, int] = {}
        self.peak = self._live = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        out = func(*args, **given[1])
        if func.is_view:
            return out
        tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        inputs = {x.untyped_storage().data_ptr() for x in tensors}
        for x in tensors:
            self._note_read(func, x, out)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs:
                self._note_new(x)
        return out

    def _note_read(self, func: Any, x: Tensor, out: Any) -> None:
        place = x.untyped_storage().data_ptr()
        if place not in self._parameters:
            return
        gathered = func.overloadpacket in _GATHERS and isinstance(out, Tensor)
        nbytes = min(out.nbytes if gathered else x.nbytes, x.untyped_storage().nbytes())
        self.read[place] = max(self.read.get(place, 0), nbytes)

    def _note_new(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        place, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes or place in self._known or place in self._parameters:
            return
        self._known.add(place)
        self._live += nbytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._freed, place, nbytes)

    def _freed(self, place: int, nbytes: int) -> None:
        self._known.discard(place)
        self._live -= nbytes


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Flops of attention from the shapes [B,H,Q,D], [B,H,K,D], [B,H,K,V]."""
    rows, heads, queries, width = query
    flops: int = 2 * rows * heads * queries * key[2] * (width + value[3])
    return flops


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of its backward pass: the scores again, and four products."""
    rows, heads, queries, width = query
    flops: int = 2 * rows * heads * queries * key[2] * (3 * width + 2 * value[3])
    return flops


#: Torch's counter has formulas for attention on a GPU only.
_CPU_ATTENTION: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
