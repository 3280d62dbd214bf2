"""Micro-batches are sent to a device one ahead: the next one is under way while the present one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
#: Applies a function to every tensor of a piece.
Map = Callable[[T, Callable[[Tensor], Tensor]], T]


def send_ahead(pieces: Iterable[T], device: torch.device, map_tensors: Map[T]) -> Iterator[T]:
    """The pieces on `device`, in order, each sent from pinned memory on a stream of its own while the one before it is
    used. Tensors that are there already are not copied; on the CPU none is."""
    api: Any = torch.cuda if device.type == "cuda" else torch.cpu
    stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()
    waiting: deque[tuple[T, Any]] = deque()

    def receive() -> T:
        piece, sent = waiting.popleft()
        current = api.current_stream(device)
        current.wait_event(sent)
        return map_tensors(piece, lambda x: _use_on(current, x))

    for piece in pieces:
        with api.stream(stream):
            moved = map_tensors(piece, lambda x: _send(x, device))
        waiting.append((moved, stream.record_event()))
        if len(waiting) > 1:
            yield receive()
    while waiting:
        yield receive()


def _send(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if x.is_cpu and device.type == "cuda" else x.to(device)


def _use_on(stream: Any, x: Tensor) -> Tensor:
    """Tell the allocator that the tensor is used on another stream than the one that it was made on."""
    if x.is_cuda:
        x.record_stream(stream)
    return x
