"""Memory of a CUDA device that processes of one host share (CUDA IPC)."""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor


class DeviceHandles(Protocol):
    """Shares memory of `device`, the trainer's, between processes."""

    device: torch.device

    def allocate(self, size: int) -> Tensor:
        """Bytes that can be exported."""
        ...

    def export(self, memory: Tensor) -> bytes:
        """What another process opens the memory with. RuntimeError: it cannot be shared."""
        ...

    def open(self, handle: bytes) -> Tensor:
        """The memory that another process exported. RuntimeError: it cannot be opened."""
        ...

    def wait(self) -> None:
        """Until the copies of this thread have ended on the device."""
        ...


class CudaHandles:
    """CUDA IPC, as `torch.multiprocessing` uses it: all processes see the same devices under the same numbers. A
    process on another device opens the memory where it is, which costs it a CUDA context there."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def export(self, memory: Tensor) -> bytes:
        return msgspec.msgpack.encode(list(memory.untyped_storage()._share_cuda_()))

    def open(self, handle: bytes) -> Tensor:
        torch.cuda.init()
        storage = torch.UntypedStorage._new_shared_cuda(*msgspec.msgpack.decode(handle))
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


def can_reach(device: str, other: str) -> bool:
    """Whether the first CUDA device can read the memory of the second (NVLink, or PCIe where the system allows it)."""
    return torch.cuda.can_device_access_peer(torch.device(device), torch.device(other))
