"""A version of the weights by broadcast, tensor by tensor, between two processes: gloo on the host, NCCL on devices."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from polyrhythm.runtime.memory.tensors import copy_into
from polyrhythm_bench.harness.worker import Answer, Worker
from polyrhythm_bench.workloads.linear_model import linear_model, medians, seconds

#: No broadcast waits longer for the other process.
_DEADLINE = timedelta(seconds=120)


def measure_collective(backend: str, devices: tuple[str, str], megabytes: int, repeats: int) -> dict[str, Any]:
    """Medians: publish_ms, of the broadcast in the sending process; apply_ms, of the broadcast in the receiving one, if
    that is a process on the CPU, and of a copy out of what it got, since a broadcast into weights that serve would mix
    versions; bare_ms, of two copies here; ratio, turn by turn."""
    state = linear_model(megabytes).to(devices[0]).state_dict()
    buffers = [{name: torch.empty_like(tensor) for name, tensor in state.items()} for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(
            f"{__name__}:receiver",
            store=f"{folder}/store",
            backend=backend,
            device=devices[1],
            megabytes=megabytes,
        )
        with worker, _joined(f"{folder}/store", backend, 0, devices[0]):
            turns = []
            for _ in range(repeats + 1):
                worker.begin()
                send = seconds(lambda: _broadcast(state), devices[0])
                apply = worker.answer()
                bare = seconds(lambda: copy_into(buffers[0], state), devices[0])
                bare += seconds(lambda: copy_into(buffers[1], buffers[0]), devices[0])
                turns.append((send, apply, bare))
    nbytes = sum(tensor.nbytes for tensor in state.values())
    return medians(turns[1:], nbytes, f"{backend} (no run uses it)")


@contextmanager
def receiver(store: str, backend: str, device: str, megabytes: int) -> Iterator[Answer]:
    """Receives one version into a buffer and copies it into the model: the receiver's seconds."""
    module = linear_model(megabytes).to(device)
    got = {name: torch.empty_like(tensor) for name, tensor in module.state_dict().items()}

    def answer() -> float:
        received = seconds(lambda: _broadcast(got), device)
        copied = seconds(lambda: copy_into(module.state_dict(), got), device)
        return copied + received if device == "cpu" else copied  # on a device it is the sender's time too

    with _joined(store, backend, 1, device):
        yield answer


def _broadcast(state: dict[str, torch.Tensor]) -> None:
    for tensor in state.values():
        dist.broadcast(tensor, 0)


@contextmanager
def _joined(store: str, backend: str, rank: int, device: str) -> Iterator[None]:
    """A group of the two processes, over the loopback interface unless another is chosen."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if device != "cpu":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=_DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()
