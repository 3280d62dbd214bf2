"""Any policy, made slow: a forward pass that acts sleeps, and an evaluation for the loss does by its chunk steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, Field, SerializeAsAny
from torch import Tensor, nn

from polyrhythm.config.registry import resolve
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations, Policy, PolicySettings, as_module
from polyrhythm.specs import EnvSpec


def _policy(value: Any) -> BaseModel:
    return resolve("policy", value)


class SlowPolicySettings(BaseModel):
    """The policy `policy`, which takes `act_ms` longer to act, whatever the rows, and `evaluate_ms` longer to evaluate
    each chunk step."""

    model_config = SETTINGS

    type: str
    """This class as module:Class."""
    policy: Annotated[SerializeAsAny[BaseModel], BeforeValidator(_policy)]
    """The policy's own settings, by type."""
    act_ms: float = Field(ge=0)
    """Milliseconds that a forward pass sleeps."""
    evaluate_ms: float = Field(ge=0)
    """Milliseconds that an evaluation for the loss sleeps for each of its chunk steps."""

    def build(self, env_spec: EnvSpec, seed: int) -> SlowPolicy:
        assert isinstance(self.policy, PolicySettings)
        inner = self.policy.build(env_spec, seed)
        return SlowPolicy(inner, self.act_ms / 1000.0, self.evaluate_ms / 1000.0, time.sleep)


class SlowPolicy(nn.Module):
    """A policy that sleeps `act_s` before it acts and `evaluate_s` for each row that it evaluates."""

    def __init__(self, policy: Policy, act_s: float, evaluate_s: float, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self.inner = as_module(policy)
        self.chunk, self.action_dim = policy.chunk, policy.action_dim
        self.exact, self.tolerance = policy.exact, policy.tolerance
        self._act_s, self._evaluate_s, self._sleep = act_s, evaluate_s, sleep

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        self._sleep(self._act_s)
        return self._policy.act(obs, greedy, noise_key)

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        self._sleep(self._evaluate_s * len(next(iter(obs.values()))))
        return self._policy.evaluate(obs, forward_inputs)

    def value(self, obs: Observations) -> Tensor:
        return self._policy.value(obs)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        return self._policy.sft_loss(obs, actions)

    @property
    def _policy(self) -> Policy:
        return cast("Policy", self.inner)
