"""Time in which a station's tensors leave the device that it leases and come back, beside bare copies of them.

Those of a CUDA device go to pinned host memory; those of the host, which stands for a device where there is none, to a
file (`plugins.lease.offload`). Bare: the same tensors copied one after another to pinned memory or a file that is
there, and back, in the same turn; nothing is freed. Both come after a turn that touches all pages.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyrhythm.plugins.lease.offload import DeviceStore, FileStore
from polyrhythm.runtime.memory.tensors import count_devices
from polyrhythm.runtime.messages import OffloadStore
from polyrhythm_bench.harness import resources
from polyrhythm_bench.harness.kept import KeptResults
from polyrhythm_bench.workloads.linear_model import linear_model, seconds

#: Largest ratio to the bare copies that the design allows on a CUDA device.
LIMIT_RATIO = 1.2
HOST = "cpu"
#: What brings tensors to a bare place and back.
Copies = tuple[Callable[[], None], Callable[[], None]]


def run(megabytes: int = 500, repeats: int = 7, out: Path | None = None) -> dict[str, Any]:
    """Switch a model of this size in float32 `repeats` times. out: folder in which each result is kept when it is
    there, and not measured again.

    Returns modes: by device what `measure` returns; within_limit: of the CUDA device, None where there is none;
    left_out: what this machine does not have, a sentence.
    """
    began = resources.read_cpu()
    devices = [HOST, "cuda:0"] if count_devices() else [HOST]
    names = [torch.cuda.get_device_name(0)] if count_devices() else []
    kept = KeptResults(out, {"megabytes": megabytes, "repeats": repeats, "torch": torch.__version__, "devices": names})
    modes = {device: kept.get(device, partial(measure, device, megabytes, repeats)) for device in devices}
    on_device = modes.get("cuda:0")
    return {
        "megabytes": megabytes,
        "repeats": repeats,
        "torch": torch.__version__,
        "others_cores": resources.others_cores(began, resources.read_cpu()),
        "limit_ratio": LIMIT_RATIO,
        "within_limit": None if on_device is None else on_device["ratio"] <= LIMIT_RATIO,
        "modes": modes,
        "left_out": [] if on_device else ["pinned host memory: torch sees no CUDA device here"],
    }


def measure(device: str, megabytes: int, repeats: int) -> dict[str, Any]:
    """Medians leave_ms, back_ms, bare_ms (there and back); ratio, turn by turn; gb_per_s of a move, one way; freed_mb.
    On the host times are CPU times of the process."""
    tensors = [p.detach() for p in linear_model(megabytes).to(device).parameters()]
    turns, freed = list[tuple[float, float, float]](), 0
    copies = _to_file if device == HOST else _to_pinned
    with (
        tempfile.TemporaryDirectory() as folder,
        _store(device, Path(folder)) as store,
        copies(tensors, Path(folder)) as (leave, back),
    ):

        def suspend() -> None:
            nonlocal freed
            freed = store.suspend(tensors)

        for _ in range(repeats + 1):
            moved = seconds(suspend, device), seconds(store.resume, device)
            turns.append((*moved, seconds(leave, device) + seconds(back, device)))
    turns = turns[1:]
    leave_s, back_s, bare_s = (statistics.median(part) for part in zip(*turns, strict=True))
    return {
        "leave_ms": 1e3 * leave_s,
        "back_ms": 1e3 * back_s,
        "bare_ms": 1e3 * bare_s,
        "ratio": statistics.median((there + again) / bare for there, again, bare in turns),
        "gb_per_s": 2 * freed / (leave_s + back_s) / 1e9,
        "freed_mb": freed / 1e6,
    }


@contextmanager
def _store(device: str, folder: Path) -> Iterator[OffloadStore]:
    store = FileStore(folder) if device == HOST else DeviceStore(device)
    yield store
    store.close()


@contextmanager
def _to_file(tensors: Sequence[Tensor], folder: Path) -> Iterator[Copies]:
    """Those of the host, written into a file and read back."""
    views = [tensor.numpy().data.cast("B") for tensor in tensors]
    with (folder / "bare").open("w+b") as file:

        def leave() -> None:
            file.seek(0)
            for view in views:
                file.write(view)
            file.flush()

        def back() -> None:
            file.seek(0)
            for view in views:
                file.readinto(view)

        yield leave, back


@contextmanager
def _to_pinned(tensors: Sequence[Tensor], _folder: Path) -> Iterator[Copies]:
    """Those of a device, copied into pinned memory and back."""
    pinned = [torch.empty_like(tensor, device=HOST, pin_memory=True) for tensor in tensors]

    def leave() -> None:
        for tensor, host in zip(tensors, pinned, strict=True):
            host.copy_(tensor, non_blocking=True)

    def back() -> None:
        for tensor, host in zip(tensors, pinned, strict=True):
            tensor.copy_(host, non_blocking=True)

    yield leave, back
