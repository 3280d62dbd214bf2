"""Forward passes as CUDA graphs: all kernels of a pass, the loop of a flow's steps included, start by one call.

A graph reads and writes the tensors that it was captured over, at their addresses. So the inputs are static, weights
are overwritten in place (`runtime.memory.receiver`), and constants that a policy keeps on the device are never freed.
Randomness comes from the noise keys, which are inputs, so a replay draws anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch

#: Passes before a capture, in which libraries choose their kernels and allocate their workspaces.
_WARM_UP = 2


class Capture(Protocol):
    """Turns a pass into something that repeats it."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run`, which reads and writes static tensors alone. RuntimeError: it cannot be captured."""
        ...


class GraphCapture:
    """Captures on `device`. The graphs share one pool for what lies between input and output, because one runs at a
    time; capturing the largest first keeps the pool small."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_of(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """As in `Capture`. A pass that makes the host wait is refused before the capture, which a failure in the
        middle would leave with an allocator that gives less memory back."""
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(here):  # a capture that fails leaves the thread on the capture's stream
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UP):
                    run()
                with _refuse_waiting():
                    run()
            here.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate meanwhile: they are not part of the graph.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Where all captures run: cuBLAS keeps 33 MB on a device for each stream that it has seen."""
    return torch.cuda.Stream(device)


@contextmanager
def _refuse_waiting() -> Iterator[None]:
    """RuntimeError for an operation within that makes the host wait for the device, such as `.item()`."""
    before = torch.cuda.get_sync_debug_mode()
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that not every such operation is detected
        torch.cuda.set_sync_debug_mode(mode)
