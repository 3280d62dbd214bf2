"""A policy as the trainer builds it on the CPU, and how it learns, for tests of policies."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from polyrhythm.conformance import ContractViolation
from polyrhythm.plugins.trial.policy_calls import called
from polyrhythm.plugins.trial.policy_contract import idle_parameters
from polyrhythm.policies.base import Observations, Policy, as_module
from polyrhythm.specs import EnvSpec


def built(settings: Any, spec: EnvSpec, seed: int = 0) -> Any:
    """The policy of these settings, with the weights of the seed."""
    return settings.build(spec, seed=seed, device="cpu", role="train")


def value_gradient_reach(policy: Policy, obs: Observations) -> set[str]:
    """Parameters that get a gradient from the value loss alone."""
    module = as_module(policy)
    module.zero_grad()
    policy.value(obs).square().sum().backward()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    reached = trained - set(idle_parameters(module))
    module.zero_grad()
    return reached


def check_supervised_training_learns(policy: Policy, obs: Observations, actions: Tensor) -> str:
    """Eight steps on one batch lower the supervised loss."""
    learner = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(as_module(learner).parameters(), lr=3e-3)
    losses: list[float] = []
    for _ in range(8):
        loss = called("sft_loss", learner.sft_loss, obs, actions)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if not losses[-1] < losses[0]:
        raise ContractViolation(
            f"sft_loss goes from {losses[0]:.4g} to {losses[-1]:.4g} in 8 steps", "look at its sign and scale"
        )
    return f"{losses[0]:.4g} to {losses[-1]:.4g} in 8 steps"
