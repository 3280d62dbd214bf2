"""The contract of a policy: one interface for token, flow-matching, Gaussian and categorical heads.

A policy's file declares a frozen pydantic settings model with a `type` literal and `build(env_spec, seed) -> Policy`
(an `nn.Module`, its parameters a function of the seed). Randomness in `act` comes from `noise_key` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Observations = Mapping[str, Tensor]


class Act(NamedTuple):
    """actions [B,C,A] in env units, logprob [B,C,A] float32, value [B] or [B,C] float32, forward_inputs
    name → [B,...]: only what obs lacks for `evaluate` (sampled tokens, for example)."""

    actions: Tensor
    logprob: Tensor
    value: Tensor
    forward_inputs: dict[str, Tensor]


class Evaluation(NamedTuple):
    """logprob, entropy [B,C,A] float32 and value (as in `Act`), with gradient."""

    logprob: Tensor
    value: Tensor
    entropy: Tensor


class Policy(Protocol):
    """`evaluate(obs, act(obs).forward_inputs).logprob == act(obs).logprob` at the same batch shape.

    chunk: C, primitive actions per chunk step. action_dim: A.
    exact: the equality above is bit-equal; otherwise it holds to `tolerance` (absolute).
    """

    chunk: int
    action_dim: int
    exact: bool
    tolerance: float

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """One forward pass without gradient. greedy [B] bool; noise_key [B] int64, one per row and step."""
        ...

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation: ...

    def value(self, obs: Observations) -> Tensor:
        """Value alone, for bootstrapping; same shape and definition as in `act`."""
        ...

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of demonstrated actions [B,C,A] in env units."""
        ...

    def state_dict(self) -> dict[str, Tensor]: ...


def as_module(policy: Policy) -> torch.nn.Module:
    """The policy as the `nn.Module` that it is, for optimizers and weights."""
    assert isinstance(policy, torch.nn.Module)
    return policy
