"""A version of a policy's weights through the real channel: published, staged beside the module, applied in place.

Published into shared memory and taken from there by a `Receiver`, as a trainer and a generator in processes of their
own do; here one process does both, so nothing waits. Beside it: `copy_` tensor by tensor from plain host memory into
the module, which is what `load_state_dict` does.
"""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyrhythm.errors import StartError
from polyrhythm.policies.form import published_state
from polyrhythm.runtime.memory.published import shared_nbytes
from polyrhythm.runtime.memory.receiver import Receiver
from polyrhythm.runtime.memory.shared_folder import SharedRunFolder
from polyrhythm.runtime.memory.weights import SharedWeights
from polyrhythm.specs import WeightsLayout
from polyrhythm.specs.weights import weight_specs
from polyrhythm_bench.harness.roofline import seconds


def measure_weights(module: nn.Module, repeats: int) -> dict[str, Any]:
    """Medians in ms: publish, stage (through `StagingBuffer`), apply (from there), direct (without staging: the way of
    a module in host memory, None elsewhere), plain; mb; ratio: stage and apply over plain, apply_ratio: what the
    passes wait for over plain, both medians turn by turn. left_out: why nothing could be measured, in one sentence.
    """
    state = published_state(module)
    layout = WeightsLayout.of(weight_specs(state))
    plain = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
    try:
        memory = SharedRunFolder({"weights": shared_nbytes(layout)})
    except StartError as error:
        return {"left_out": str(error)}
    try:
        weights = SharedWeights(layout, memoryview(memory.segment("weights")), memory.folder)
        weights.publish(0, state)
        ends = _Ends(weights, Receiver(weights, module), Receiver(weights, module))
        ends.staged.stage(0)  # touches the memory of the staging buffer
        turns = [_turn(module, ends, plain) for _ in range(repeats + 1)][1:]
        del weights, ends
    finally:
        memory.remove()
    times = {name: 1e3 * statistics.median(turn[name] for turn in turns) for name in turns[0]}
    waits = "direct" if "direct" in times else "apply"
    return {
        "mb": layout.nbytes / 1e6,
        **{f"{name}_ms": value for name, value in times.items()},
        "ratio": statistics.median((turn["stage"] + turn["apply"]) / turn["plain"] for turn in turns),
        "apply_ratio": statistics.median(turn[waits] / turn["plain"] for turn in turns),
    }


class _Ends(NamedTuple):
    """The channel, and two receivers for one module: one takes versions through its staging buffer, one directly."""

    weights: SharedWeights
    staged: Receiver
    direct: Receiver


def _turn(module: nn.Module, ends: _Ends, plain: dict[str, Tensor]) -> dict[str, float]:
    """Seconds of each part, with versions of their own."""
    device, state = next(module.parameters()).device, published_state(module)
    version = ends.weights.newest + 1
    found = {"publish": seconds(lambda: ends.weights.publish(version, state), device)}
    found["stage"] = seconds(lambda: ends.staged.stage(version), device)
    found["apply"] = seconds(lambda: ends.staged.apply(version), device)
    if device.type == "cpu":
        ends.weights.publish(version + 1, state)
        found["direct"] = seconds(lambda: ends.direct.apply(version + 1), device)

    def copy() -> None:
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(plain[name])

    found["plain"] = seconds(copy, device)
    return found
