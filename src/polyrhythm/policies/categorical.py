"""MLP policy with a categorical distribution over discrete actions, on flat observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations
from polyrhythm.policies.constants import kept
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import Activation, FlatObservation, Mlp, seeded
from polyrhythm.policies.traits import PolicyTraits, SettingsTraits
from polyrhythm.specs import ArraySpec, EnvSpec


class CategoricalSettings(BaseModel):
    """MLP policy over discrete choices."""

    model_config = SETTINGS
    traits: ClassVar = SettingsTraits(policy=PolicyTraits(critic=True))
    needs: ClassVar = ("torch",)

    type: Literal["categorical"] = "categorical"
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

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        answers = {"tokens": ArraySpec((self.chunk, env_spec.action.dim), "int64")}
        return describe(lambda _role: CategoricalPolicy(self, env_spec), answers)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> CategoricalPolicy:  # noqa: ARG002
        """The same module for both roles, initialised on the CPU so that the weights are equal on every device."""
        with seeded(seed):
            return CategoricalPolicy(self, env_spec).to(device)


class CategoricalPolicy(nn.Module):
    """An MLP policy whose C·A entries are drawn independently from softmax(logits(obs)).

    Each entry has logits for the largest number of choices of any entry; the surplus ones are masked. forward_inputs =
    {"tokens": int64 [B,C,A]}.
    """

    def __init__(self, settings: CategoricalSettings, env_spec: EnvSpec) -> None:
        super().__init__()
        action = env_spec.action
        if action.kind != "discrete" or action.choices < 1:
            raise ValueError(
                f"policy.type = 'categorical' needs discrete actions with at least one choice, the environment's are "
                f"{action.kind!r} with {action.choices} choices: use policy.type = 'gaussian' or 'tiny_vla'"
            )
        self.chunk, self.action_dim = settings.chunk, action.dim
        self.choices, self.counts = action.choices, action.counts
        self.exact, self.tolerance = True, 1e-5
        self.flat = FlatObservation(env_spec, settings.progress, settings.normalize_observations)
        shape = (settings.hidden, settings.layers, settings.activation)
        self.actor = Mlp(self.flat.size, self.chunk * self.action_dim * self.choices, *shape, output_gain=0.01)
        self.critic = Mlp(self.flat.size, 1, *shape, output_gain=1.0)

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

    def value(self, obs: Observations) -> Tensor:
        value: Tensor = self.critic(self.flat(obs)).squeeze(1)
        return value

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
