"""MLP policy with a categorical distribution over discrete actions, on flat observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.constants import kept
from polyrhythm.policies.mlp import MlpPolicy, MlpSettings
from polyrhythm.specs import ArraySpec, EnvSpec


class CategoricalSettings(MlpSettings):
    """MLP policy over discrete choices."""

    type: Literal["categorical"] = "categorical"
    """The policy's name."""

    def policy(self, env_spec: EnvSpec) -> CategoricalPolicy:
        return CategoricalPolicy(self, env_spec)

    def answers(self, env_spec: EnvSpec) -> Mapping[str, ArraySpec]:
        return {"tokens": ArraySpec((self.chunk, env_spec.action.dim), "int64")}


class CategoricalPolicy(MlpPolicy):
    """An MLP policy whose C·A entries are drawn independently from softmax(logits(obs)). Each entry has logits for the
    largest number of choices of any entry; the surplus ones are masked. forward_inputs = {"tokens": int64 [B,C,A]}."""

    def __init__(self, settings: CategoricalSettings, env_spec: EnvSpec) -> None:
        action = env_spec.action
        if action.kind != "discrete" or action.choices < 1:
            raise ValueError(
                f"policy.type = 'categorical' needs discrete actions with at least one choice, the environment's are "
                f"{action.kind!r} with {action.choices} choices: use policy.type = 'gaussian' or 'tiny_vla'"
            )
        super().__init__(settings, env_spec, action.choices)
        self.choices, self.counts = action.choices, action.counts

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        x = self.flat(obs)
        log_p = self._log_p(x)
        draws = noise.uniform(noise_key, self.chunk * self.action_dim).view(log_p.shape[:-1])
        last = None if min(self.counts) == self.choices else _counts(self.counts, x.device) - 1
        tokens = distributions.categorical_sample(log_p, draws, greedy, log_p.argmax(-1), last)
        logprob = distributions.categorical_logprob(log_p, tokens)
        return Act(tokens, logprob, self.critic(x).squeeze(1), {"tokens": tokens})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        x = self.flat(obs)
        log_p = self._log_p(x)
        logprob = distributions.categorical_logprob(log_p, forward_inputs["tokens"])
        return Evaluation(logprob, self.critic(x).squeeze(1), distributions.categorical_entropy(log_p))

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Mean cross entropy per entry of actions [B,C,A] int64."""
        return -distributions.categorical_logprob(self._log_p(self.flat(obs)), actions.long()).mean()

    def _log_p(self, x: Tensor) -> Tensor:
        logits = self.actor(x).view(-1, self.chunk, self.action_dim, self.choices)
        if min(self.counts) == self.choices:
            return distributions.log_probs(logits)
        counts = _counts(self.counts, x.device)
        return distributions.log_probs(logits, torch.arange(self.choices, device=x.device) < counts[:, None])


@kept
def _counts(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, device=device)
