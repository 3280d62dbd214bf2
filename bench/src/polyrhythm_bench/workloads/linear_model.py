"""A model of a given size whose only content is weights: forty square linear layers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyrhythm.runtime.devices import is_simulated
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs

_LAYERS = 40


def linear_model(megabytes: int) -> torch.nn.Module:
    """About so many 10^6 bytes in float32; layers map rows [B,W] to [B,W]."""
    width = max(1, round((megabytes * 1e6 / 4 / _LAYERS) ** 0.5))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(_LAYERS)))


def layout_of(state: Mapping[str, Tensor]) -> WeightsLayout:
    """Where the tensors lie when they are published."""
    return WeightsLayout.of(weight_specs(state))


def torch_name(device: str) -> str:
    """The name that torch has for a device of a run whose local numbers are the run's."""
    return "cpu" if is_simulated(device) else device


def run_pass(model: torch.nn.Module, rows: int, device: str) -> float:
    """Seconds of a forward pass of random rows."""
    x = torch.rand(rows, next(model.parameters()).shape[0], device=device)
    with torch.inference_mode():
        return seconds(lambda: model(x), device)


def medians(turns: Sequence[tuple[float, float, float]], nbytes: int, way: str) -> dict[str, Any]:
    """Of turns (seconds of publishing, of applying, of bare copies): medians publish_ms, apply_ms, bare_ms; ratio, turn
    by turn; gb_per_s from state to module; way that versions took."""
    publish, apply, bare = (statistics.median(part) for part in zip(*turns, strict=True))
    return {
        "publish_ms": 1e3 * publish,
        "apply_ms": 1e3 * apply,
        "bare_ms": 1e3 * bare,
        "ratio": statistics.median((p + a) / b for p, a, b in turns),
        "gb_per_s": nbytes / (publish + apply) / 1e9,
        "way": way,
    }


def seconds(act: Callable[[], object], device: str = "cpu") -> float:
    """Seconds until the device has done it; on the CPU those of this process, so waiting for a core does not count."""
    if device == "cpu":
        begin = time.process_time()
        act()
        return time.process_time() - begin
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    act()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin
