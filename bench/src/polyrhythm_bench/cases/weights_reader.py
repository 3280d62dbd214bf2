"""The generator's end of `bench weights`, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from polyrhythm.runtime.devices import CPU
from polyrhythm.runtime.memory.process_memory import open_weights
from polyrhythm.runtime.memory.published import APPLY, Ends
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import open_segment
from polyrhythm.runtime.memory.tensors import copy_into, tensors_over, views_of
from polyrhythm.runtime.memory.weights import Weights
from polyrhythm_bench.harness.worker import Answer
from polyrhythm_bench.workloads.linear_model import layout_of, linear_model, run_pass, seconds, torch_name

_DEADLINE_S = 300.0


@contextmanager
def reader(folder: str, megabytes: int, trainer: str, device: str) -> Iterator[Answer]:
    """Answers: `version`: seconds of applying it, and the way that it came; `bare`: seconds of the bare copy; `rows`:
    seconds of a pass; `rows` and `serve`: see `_serve`."""
    place = torch_name(device)
    model = linear_model(megabytes).to(place)
    state = model.state_dict()
    layout = layout_of(state)
    memory = memoryview(open_segment(Path(folder), "weights"))
    weights = open_weights(layout, memory, Path(folder), device, Ends(trainer, (device,)))
    receiver = Receiver(weights, model)
    if torch_name(trainer) == CPU:
        plain = tensors_over(layout, memoryview(open_segment(Path(folder), "bare")))
    else:
        plain = views_of(layout, torch.zeros(layout.nbytes, dtype=torch.uint8, device=trainer))

    def answer(version: int = -1, rows: int = 0, serve: int = -1, *, bare: bool = False) -> Any:
        if bare:
            return seconds(lambda: copy_into(state, plain), place)
        if serve >= 0:
            return _serve(weights, lambda: run_pass(model, rows, place), serve), apply(serve)
        return run_pass(model, rows, place) if rows else (apply(version), way())

    def apply(version: int) -> float:
        return seconds(lambda: receiver.apply(version), place)

    def way() -> str:
        return next(kind for kind in receiver.traffic.moved if kind != APPLY)

    yield answer


def _serve(weights: Weights, serve_pass: Callable[[], float], version: int) -> list[float]:
    """Seconds of each pass until the version is there, one pass at least."""
    passes, end = [serve_pass()], time.monotonic() + _DEADLINE_S
    while weights.newest < version:
        passes.append(serve_pass())
        if time.monotonic() > end:
            raise TimeoutError(f"version {version} was not published within {_DEADLINE_S:g} s")
    return passes
