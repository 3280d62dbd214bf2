"""Normalises observations by a running mean and variance that are part of the policy's weights.

Invariant: only `training.moments` changes them, at the end of an update and before the next publication. So they are
constant within a version, every process has those of its version, and evaluation changes nothing
(docs/design/training-and-objectives.md).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from polyrhythm.specs import ArraySpec

#: Addend to the variance, and maximum magnitude of a normalised entry, as in Gymnasium and Stable-Baselines3.
EPSILON, LIMIT = 1e-8, 10.0


class ObservationNormalizer(nn.Module):
    """Maps observations to observations whose floating-point arrays are (x − mean)/√(variance + 1e-8), within ±10.

    observation: specs of the environment's arrays by name; integer arrays, and so images, are unchanged. Buffers,
    float64: count [1], number of observations in the statistics; mean, variance and scale = 1/√(variance + 1e-8)
    [entries], of all floating-point arrays by name. Initially 0, 0, 1 and 1.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    scale: Tensor

    def __init__(self, observation: Mapping[str, ArraySpec]) -> None:
        super().__init__()
        self.names = sorted(name for name, spec in observation.items() if "float" in spec.dtype)
        shapes = [observation[name].shape for name in self.names]
        ends = [sum(prod(shape) for shape in shapes[: i + 1]) for i in range(len(shapes))]
        self._places = [
            (name, shape, slice(end - prod(shape), end))
            for name, shape, end in zip(self.names, shapes, ends, strict=True)
        ]
        entries = ends[-1] if ends else 0
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(entries, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(entries, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(entries, dtype=torch.float64))

    def forward(self, obs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The observations [B,...] with normalised float32 arrays in place of the floating-point ones."""
        normalized = {
            name: ((obs[name] - self.mean[own].view(shape)) * self.scale[own].view(shape)).clamp(-LIMIT, LIMIT).float()
            for name, shape, own in self._places
        }
        return ChainMap(normalized, obs)  # type: ignore[arg-type] # nobody writes to it

    def entries(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Input of the statistics: the floating-point arrays [N,...] as float64 [N,entries]."""
        return torch.cat([obs[name].double().flatten(1) for name in self.names], dim=1)

    def set(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        scale = (variance + EPSILON).rsqrt()
        for buffer, value in zip(self.buffers(), (count, mean, variance, scale), strict=True):
            buffer.copy_(value)


def normalizers_of(module: nn.Module) -> list[ObservationNormalizer]:
    """Normalizers within a policy that have an array to normalise."""
    return [part for part in module.modules() if isinstance(part, ObservationNormalizer) and part.names]
