"""What wrappers around any policy have in common: the inner policy's settings, its form, and the calls handed on."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, SerializeAsAny
from torch import Tensor, nn

from polyrhythm.config.registry import resolve
from polyrhythm.policies.base import Observations, Policy, as_module, as_settings
from polyrhythm.policies.form import PolicyForm
from polyrhythm.specs import EnvSpec


def _policy(value: Any) -> BaseModel:
    return resolve("policy", value)


#: The inner policy's own settings, by type.
InnerPolicy = Annotated[SerializeAsAny[BaseModel], BeforeValidator(_policy)]


def wrapped_form(policy: BaseModel, env_spec: EnvSpec) -> PolicyForm:
    """The form of a `WrappedPolicy` around the policy of these settings."""
    inner = as_settings(policy).form(env_spec)
    return replace(inner, published={f"inner.{name}": spec for name, spec in inner.published.items()})


class WrappedPolicy(nn.Module):
    """A policy around another one; acting and evaluating are the subclass's."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.inner = as_module(policy)
        self.chunk, self.action_dim = policy.chunk, policy.action_dim
        self.exact, self.tolerance = policy.exact, policy.tolerance

    def value(self, obs: Observations) -> Tensor:
        return self._policy.value(obs)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        return self._policy.sft_loss(obs, actions)

    @property
    def _policy(self) -> Policy:
        return cast("Policy", self.inner)
