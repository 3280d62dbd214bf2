"""Time to move weights from one process to another over the weights bus, beside the bare copies that it needs.

The bus: this process publishes a model (a copy into shared memory), another applies it (a copy out of it), timed each
where it happens. Bare: the same bytes copied by torch into the same kind of memory here, and out of it there, tensor
by tensor. Both take turns, after one to touch all pages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyrhythm.runtime.memory.shared_folder import SharedRunFolder, open_segment
from polyrhythm.runtime.memory.tensors import nbytes_of, tensors_over
from polyrhythm.runtime.memory.weights import WeightsBus, bus_nbytes
from polyrhythm_bench.harness.worker import Answer, Worker

#: Largest ratio to the bare copies that the design allows.
LIMIT_RATIO = 2.0
_LAYERS = 40


def run(megabytes: int = 500, repeats: int = 7) -> dict[str, Any]:
    """Publish and apply a model of this size `repeats` times.

    Returns `publish_ms`, `apply_ms`, `bare_ms` (both copies), medians; `ratio`, the median of the ratios turn by turn.
    """
    state = _model(megabytes).state_dict()
    memory = SharedRunFolder({"weights": bus_nbytes(state), "bare": nbytes_of(state)})
    try:
        bus = WeightsBus(state, memoryview(memory.segment("weights")))
        bare = tensors_over(state, memoryview(memory.segment("bare")))
        turns = []
        with Worker(f"{__name__}:reader", folder=str(memory.folder), megabytes=megabytes) as reader:
            for version in range(repeats + 1):
                publish = _seconds(lambda v=version: bus.publish(v, state))  # type: ignore[misc]
                apply = reader.ask(version=version)
                write = _seconds(lambda: _copy(state, bare))
                turns.append((publish, apply, write + reader.ask(version=-1)))
    finally:
        memory.remove()
    publish, apply, copies = (statistics.median(part) for part in zip(*turns[1:], strict=True))
    ratio = statistics.median((p + a) / b for p, a, b in turns[1:])
    return {
        "megabytes": megabytes,
        "publish_ms": 1e3 * publish,
        "apply_ms": 1e3 * apply,
        "bare_ms": 1e3 * copies,
        "ratio": ratio,
        "limit_ratio": LIMIT_RATIO,
        "within_limit": ratio < LIMIT_RATIO,
    }


@contextmanager
def reader(folder: str, megabytes: int) -> Iterator[Answer]:
    """Applies `version`, or copies the bare bytes for -1: seconds."""
    model = _model(megabytes)
    state = model.state_dict()
    bus = WeightsBus(state, memoryview(open_segment(Path(folder), "weights")))
    bare = tensors_over(state, memoryview(open_segment(Path(folder), "bare")))

    def answer(version: int) -> float:
        if version < 0:
            return _seconds(lambda: _copy(bare, state))
        return _seconds(lambda: bus.apply(version, model))

    yield answer


def _model(megabytes: int) -> torch.nn.Module:
    width = max(1, round((megabytes * 1e6 / 4 / _LAYERS) ** 0.5))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_LAYERS)))


def _copy(source: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            into[name].copy_(tensor)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin
