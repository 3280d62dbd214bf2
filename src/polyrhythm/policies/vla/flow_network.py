"""Defines the interface of a network that predicts the velocity of flow matching behind a vision-language prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from polyrhythm.policies.layers.attention import KeysValues


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

    horizon: H, actions that it predicts. action_dim: A, their entries with padding.
    """

    horizon: int
    action_dim: int

    def prefix(self, inputs: Mapping[str, Tensor]) -> Prefix:
        """The pass over images and language, once per chunk step. inputs: the arrays of `VlaInputs`, rows first."""
        ...

    def velocity(self, prefix: Prefix, inputs: Mapping[str, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """x [B,H,A] float32, t [B] in 1 (noise) .. 0 (data) -> noise − data [B,H,A] float32, and the features
        [B,H,W] float32 from which it was read."""
        ...
