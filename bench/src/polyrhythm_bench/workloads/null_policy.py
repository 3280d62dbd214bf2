"""A policy that ignores its observation and answers zero: a forward pass and a training step cost next to nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations
from polyrhythm.specs import EnvSpec


class NullSettings(BaseModel):
    """Nothing to set."""

    model_config = SETTINGS

    type: str
    """This class as module:Class."""

    def build(self, env_spec: EnvSpec, seed: int) -> NullPolicy:  # noqa: ARG002 (the contract's)
        return NullPolicy(env_spec.action.dim)


class NullPolicy(nn.Module):
    """Actions, log-probs and values are zero; its one parameter has a gradient, always zero, so that it can be trained.
    """

    def __init__(self, action_dim: int) -> None:
        super().__init__()
        self.chunk, self.action_dim = 1, action_dim
        self.exact, self.tolerance = True, 0.0
        self.nothing = nn.Parameter(torch.zeros(1))
        self._actions, self._value = torch.zeros(1, 1, action_dim), torch.zeros(1)

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:  # noqa: ARG002
        actions = self._actions.expand(len(noise_key), -1, -1)
        return Act(actions, actions, self._value.expand(len(noise_key)), {})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:  # noqa: ARG002
        rows = len(next(iter(obs.values())))
        entries = (0 * self.nothing).expand(rows, 1, self.action_dim)
        return Evaluation(entries, (0 * self.nothing).expand(rows), entries)

    def value(self, obs: Observations) -> Tensor:
        return torch.zeros(len(next(iter(obs.values()))))

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:  # noqa: ARG002
        return (0 * self.nothing).sum()
