"""Parts of the MLP policies: settings, flat observations, an orthogonally initialised MLP, seeded construction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.policies.base import SETTINGS, Observations, Policy
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.normalizer import ObservationNormalizer
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import PROGRESS, ArraySpec, EnvSpec

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
    """An MLP with `layers` hidden layers of `hidden` units: [B,inputs] -> [B,outputs]. Weights are orthogonal, with
    gain √2 in hidden layers and `output_gain` in the last (small for a policy, so that it starts nearly uniform)."""

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


class MlpSettings(BaseModel):
    """Settings of an MLP policy; one for a kind of action adds `type`, `policy` and `answers`."""

    model_config = SETTINGS
    traits: ClassVar = SettingsTraits(policy=PolicyTraits(critic=True))
    needs: ClassVar = ("torch",)

    type: Literal["gaussian", "categorical"]
    """The policy's name."""
    hidden: int = Field(64, ge=1)
    """Units per hidden layer, of the policy and of the value network."""
    layers: int = Field(2, ge=0)
    """Hidden layers of each network."""
    activation: Activation = "tanh"
    """Function after each hidden layer."""
    chunk: int = Field(1, ge=1)
    """Primitive actions per chunk step (C)."""
    progress: bool = False
    """Show the networks the share of the episode that has passed."""
    normalize_observations: bool = False
    """Normalise floating-point observations by their running mean and variance, which are saved with the weights."""

    def policy(self, env_spec: EnvSpec) -> Any:
        """The policy, initialised from torch's generator."""
        raise NotImplementedError

    def answers(self, env_spec: EnvSpec) -> Mapping[str, ArraySpec]:
        """One row of the policy's forward_inputs."""
        raise NotImplementedError

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        return describe(lambda _role: self.policy(env_spec), self.answers(env_spec))

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> Policy:  # noqa: ARG002
        """The same module for both roles, initialised on the CPU so that the weights are equal on every device."""
        with seeded(seed):
            return cast(Policy, self.policy(env_spec).to(device))


class MlpPolicy(nn.Module):
    """Networks of an MLP policy. outputs: of the actor, for each of its C·A action entries."""

    def __init__(self, settings: MlpSettings, env_spec: EnvSpec, outputs: int = 1) -> None:
        super().__init__()
        self.chunk, self.action_dim = settings.chunk, env_spec.action.dim
        self.exact, self.tolerance = True, 1e-5
        self.flat = FlatObservation(env_spec, settings.progress, settings.normalize_observations)
        shape = (settings.hidden, settings.layers, settings.activation)
        self.actor = Mlp(self.flat.size, self.chunk * self.action_dim * outputs, *shape, output_gain=0.01)
        self.critic = Mlp(self.flat.size, 1, *shape, output_gain=1.0)

    def value(self, obs: Observations) -> Tensor:
        value: Tensor = self.critic(self.flat(obs)).squeeze(1)
        return value
