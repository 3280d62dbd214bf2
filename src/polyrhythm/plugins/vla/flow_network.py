"""Defines the interface of a network that predicts the velocity of flow matching behind a vision-language prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from polyrhythm.plugins.vla.layers.attention import KeysValues

#: How the names of a stored prefix and of the inputs beside it begin, within observations (`FlowPolicy.precompute`).
STORED, STORED_INPUT = "prefix.", "prefix_input."


class Prefix(NamedTuple):
    """What one pass over images and language leaves for the denoise steps; every tensor begins with the rows.

    keys_values: of each layer that a denoise step attends to; present [B,P] bool: the tokens that exist; features
    [B,W] float32: a summary for the value.
    """

    keys_values: tuple[KeysValues, ...]
    present: Tensor
    features: Tensor


class FlowNetwork(Protocol):
    """A flow network, an `nn.Module` with the parameter names of its release.

    horizon: H, actions that it predicts. action_dim: A, their entries with padding. feature_width: entries of the
    prefix's features; action_width: of the features that `velocity` returns. step_inputs: names of the inputs that
    `velocity` reads.
    """

    horizon: int
    action_dim: int
    feature_width: int
    action_width: int
    step_inputs: tuple[str, ...]

    def initialise(self) -> None:
        """Draw all parameters from torch's generator, where there is no checkpoint."""
        ...

    def prefix_parameters(self) -> Iterable[Tensor]:
        """The parameters that `prefix` depends on."""
        ...

    def frozen_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Where a part of the prefix's pass is frozen: inputs of which `prefix` computes only the rest, in place of
        these; {} where none is."""
        ...

    def prefix(self, inputs: Mapping[str, Tensor], *, features: bool = True) -> Prefix:
        """The pass over images and language, once per chunk step. inputs: the arrays of `VlaInputs`, rows first.

        features: False where no value is needed; the answer's features are then [B,0].
        """
        ...

    def velocity(self, prefix: Prefix, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,H,A] float32, t [B] in 1 (noise) .. 0 (data) -> noise − data [B,H,A] float32, and the features
        [B,H,W] float32 from which it was read."""
        ...


def stored(prefix: Prefix) -> dict[str, Tensor]:
    """The prefix as named arrays, rows first."""
    arrays = {f"{STORED}present": prefix.present, f"{STORED}features": prefix.features}
    for index, (keys, values) in enumerate(prefix.keys_values):
        arrays |= {f"{STORED}keys.{index}": keys, f"{STORED}values.{index}": values}
    return arrays


def restored(arrays: Mapping[str, Tensor]) -> Prefix | None:
    """The prefix among these arrays; None if there is none."""
    if f"{STORED}present" not in arrays:
        return None
    layers = sum(name.startswith(f"{STORED}keys.") for name in arrays)
    return Prefix(
        tuple((arrays[f"{STORED}keys.{i}"], arrays[f"{STORED}values.{i}"]) for i in range(layers)),
        arrays[f"{STORED}present"],
        arrays[f"{STORED}features"],
    )


def repeated(prefix: Prefix, times: int) -> Prefix:
    """Every row `times` times in a row."""
    if times == 1:
        return prefix
    keys_values = tuple((k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)) for k, v in prefix.keys_values)
    return Prefix(keys_values, *(torch.repeat_interleave(x, times, 0) for x in prefix[1:]))
