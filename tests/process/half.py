"""A categorical policy that acts in bfloat16 and trains in float32; and one whose form says so, wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyrhythm.policies.base import Act, Observations
from polyrhythm.policies.categorical import CategoricalPolicy, CategoricalSettings
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import FlatObservation, seeded


class InDtype(nn.Module):
    """Observations as one vector, in a dtype."""

    def __init__(self, flat: FlatObservation, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self._flat, self._dtype = flat.size, flat, dtype

    def forward(self, obs: Observations) -> Tensor:
        vector: Tensor = self._flat(obs).to(self._dtype)
        return vector


class Half(CategoricalPolicy):
    """Computes in `dtype`; what it answers is float32, as the contract says."""

    def __init__(self, settings: CategoricalSettings, env_spec: Any, dtype: torch.dtype) -> None:
        super().__init__(settings, env_spec)
        self.exact, self.tolerance = False, 0.05
        self.flat = InDtype(self.flat, dtype)  # type: ignore[assignment]
        self.to(dtype)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        act = super().act(obs, greedy, noise_key)
        return act._replace(logprob=act.logprob.float(), value=act.value.float())

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Any:
        found = super().evaluate(obs, forward_inputs)
        return type(found)(*(tensor.float() for tensor in found))

    def value(self, obs: Observations) -> Tensor:
        return super().value(obs).float()


class HalfSettings(CategoricalSettings):
    """The policy above."""

    type: Literal["tests.process.half:HalfSettings"] = "tests.process.half:HalfSettings"  # type: ignore[assignment]

    def form(self, env_spec: Any) -> PolicyForm:
        return describe(lambda role: self.make(env_spec, role), super().form(env_spec).answers)

    def build(self, env_spec: Any, *, seed: int, device: str, role: Role) -> Half:
        with seeded(seed):
            return self.make(env_spec, role).to(device)

    def make(self, env_spec: Any, role: Role) -> Half:
        return Half(self, env_spec, torch.bfloat16 if role == "act" else torch.float32)


class FullSettings(HalfSettings):
    """Its form says bfloat16, but what acts is float32."""

    type: Literal["tests.process.half:FullSettings"] = "tests.process.half:FullSettings"  # type: ignore[assignment]

    def build(self, env_spec: Any, *, seed: int, device: str, role: Role) -> Half:
        return super().build(env_spec, seed=seed, device=device, role="train")
