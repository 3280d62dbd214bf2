"""Parts of the MLP policies: flat observations, an orthogonally initialised MLP, seeded construction."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.policies.base import Observations
from polyrhythm.policies.normalizer import ObservationNormalizer
from polyrhythm.specs import PROGRESS, EnvSpec

Activation = Literal["tanh", "relu", "silu"]
_FUNCTIONS = {"tanh": torch.tanh, "relu": torch.relu, "silu": functional.silu}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Initialise parameters from `seed`; the global random state is restored (only the CPU's is used)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class FlatObservation(nn.Module):
    """The observation arrays of an env spec, concatenated by name as float32 [B,size]; uint8 is scaled to 0..1.

    `progress` adds `PROGRESS` as the last entry; normalize: see `ObservationNormalizer`. `INSTRUCTION` is left out,
    since it is an index.
    """

    def __init__(self, env_spec: EnvSpec, progress: bool, normalize: bool = False) -> None:
        super().__init__()
        self.names = sorted(env_spec.observation)
        if not self.names and not progress:
            raise ValueError("policy: the environment shows no observation arrays; set policy.progress to true")
        self.scales = [1.0 / 255.0 if env_spec.observation[name].dtype == "uint8" else None for name in self.names]
        self.progress = progress
        self.size = sum(prod(env_spec.observation[name].shape) for name in self.names) + progress
        self.normalizer = ObservationNormalizer(env_spec.observation) if normalize else nn.Identity()

    def forward(self, obs: Observations) -> Tensor:
        obs = self.normalizer(obs)
        parts = [_flat(obs[name], scale) for name, scale in zip(self.names, self.scales, strict=True)]
        if self.progress:
            parts.append(obs[PROGRESS].float().unsqueeze(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _flat(array: Tensor, scale: float | None) -> Tensor:
    flat = array.float().reshape(array.shape[0], -1)
    return flat if scale is None else flat * scale


class Mlp(nn.Module):
    """An MLP with `layers` hidden layers of `hidden` units: [B,inputs] -> [B,outputs].

    Weights are orthogonal, with gain √2 in hidden layers and `output_gain` in the last (small for a policy, so that it
    starts nearly uniform).
    """

    def __init__(
        self, inputs: int, outputs: int, hidden: int, layers: int, activation: Activation, output_gain: float
    ) -> None:
        super().__init__()
        sizes = [inputs, *[hidden] * layers, outputs]
        self._order = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.linears = nn.ModuleList(self._order)
        self.activation = _FUNCTIONS[activation]
        for linear, gain in zip(self._order, [2.0**0.5] * layers + [output_gain], strict=True):
            nn.init.orthogonal_(linear.weight, gain=gain)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self._order
        for linear in hidden:
            x = self.activation(functional.linear(x, linear.weight, linear.bias))
        return functional.linear(x, last.weight, last.bias)
