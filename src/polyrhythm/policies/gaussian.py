"""MLP policy with a diagonal normal of state-independent std over continuous actions."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.mlp import MlpPolicy, MlpSettings
from polyrhythm.specs import ActionSpec, ArraySpec, EnvSpec


class GaussianSettings(MlpSettings):
    """MLP policy with a diagonal normal, for continuous actions."""

    type: Literal["gaussian"] = "gaussian"
    """The policy's name."""
    init_log_std: float = Field(-0.5, ge=-10.0, le=2.0)
    """Log of the initial spread, in units of half the action range."""

    def policy(self, env_spec: EnvSpec) -> GaussianPolicy:
        return GaussianPolicy(self, env_spec)

    def answers(self, env_spec: EnvSpec) -> Mapping[str, ArraySpec]:
        return {"raw": ArraySpec((self.chunk, env_spec.action.dim), "float32")}


class GaussianPolicy(MlpPolicy):
    """A Gaussian MLP policy: u ~ N(mean(obs), std) in normalised units, action = middle + half-range · clip(u, -1, 1).

    The log-prob is that of u before clipping, a density in normalised units. forward_inputs = {"raw": u [B,C,A]
    float32}.
    """

    middle: Tensor
    half_range: Tensor

    def __init__(self, settings: GaussianSettings, env_spec: EnvSpec) -> None:
        low, high = continuous_bounds(env_spec.action, "gaussian")
        super().__init__(settings, env_spec)
        self.log_std = nn.Parameter(torch.full((self.chunk, self.action_dim), settings.init_log_std))
        self.register_buffer("middle", (high + low) / 2, persistent=False)
        self.register_buffer("half_range", (high - low) / 2, persistent=False)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        x = self.flat(obs)
        mean = self._mean(x)
        draws = noise.normal(noise_key, self.chunk * self.action_dim).view_as(mean)
        raw = distributions.normal_sample(mean, self.log_std, draws, greedy)
        logprob = distributions.normal_logprob(raw, mean, self.log_std)
        actions = self.middle + self.half_range * raw.clamp(-1.0, 1.0)
        return Act(actions, logprob, self.critic(x).squeeze(1), {"raw": raw})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        x = self.flat(obs)
        mean = self._mean(x)
        logprob = distributions.normal_logprob(forward_inputs["raw"], mean, self.log_std)
        entropy = distributions.normal_entropy(self.log_std).expand_as(mean)
        return Evaluation(logprob, self.critic(x).squeeze(1), entropy)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Mean negative log-likelihood per entry of actions [B,C,A] in env units."""
        raw = (actions.float() - self.middle) / self.half_range
        return -distributions.normal_logprob(raw, self._mean(self.flat(obs)), self.log_std).mean()

    def _mean(self, x: Tensor) -> Tensor:
        mean: Tensor = self.actor(x).view(-1, self.chunk, self.action_dim)
        return mean


def continuous_bounds(action: ActionSpec, policy: str) -> tuple[Tensor, Tensor]:
    """`low`, `high` [A] float32 of a bounded continuous action. ValueError: the action has another kind or no finite
    bounds."""
    if action.kind != "continuous":
        raise ValueError(
            f"policy.type = {policy!r} needs continuous actions, the environment's are {action.kind!r}: "
            "use policy.type = 'categorical'"
        )
    bad = [(a, b) for a, b in zip(action.low, action.high, strict=True) if not (isfinite(a) and isfinite(b) and a < b)]
    if bad or len(action.low) != action.dim:
        raise ValueError(
            f"policy.type = {policy!r} needs finite action bounds with low < high in all {action.dim} entries, got "
            f"low = {action.low}, high = {action.high}: give the environment's action spec finite bounds"
        )
    return torch.tensor(action.low, dtype=torch.float32), torch.tensor(action.high, dtype=torch.float32)
