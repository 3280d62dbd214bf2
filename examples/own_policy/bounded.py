"""A policy of your own: actions from Kumaraswamy's distribution, bounded as a robot's are (docs/own-policies.md)."""

import torch
from torch import Tensor, nn

from polyrhythm.config.base import Count, Section
from polyrhythm.policies import noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import FlatObservation, seeded
from polyrhythm.specs import ArraySpec, EnvSpec


class BoundedPolicy(nn.Module):
    """unit ~ Kumaraswamy(a, b) in 0..1 with a, b ≥ 1; the action is low + unit · range."""

    def __init__(self, env: EnvSpec, hidden: int) -> None:
        super().__init__()
        self.chunk, self.action_dim, self.exact, self.tolerance = 1, env.action.dim, True, 1e-4
        self.flat = FlatObservation(env, progress=False)
        self.actor = nn.Sequential(nn.Linear(self.flat.size, hidden), nn.Tanh(), nn.Linear(hidden, 2 * env.action.dim))
        self.critic = nn.Sequential(nn.Linear(self.flat.size, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.register_buffer("low", torch.tensor(env.action.low), persistent=False)
        self.register_buffer("range", torch.tensor(env.action.high) - self.low, persistent=False)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        (a, b), drawn = self.shape(obs), noise.uniform(noise_key, self.action_dim).unsqueeze(1)
        drawn = torch.where(greedy.view(-1, 1, 1), 0.5, drawn)  # greedy: the median
        unit = ((1 - (1 - drawn) ** (1 / b)) ** (1 / a)).clamp(1e-6, 1 - 1e-6)
        logprob, value, _ = self.evaluate(obs, {"unit": unit})
        return Act(self.low + unit * self.range, logprob, value, {"unit": unit})

    def evaluate(self, obs: Observations, forward_inputs: dict[str, Tensor]) -> Evaluation:
        (a, b), log_x = self.shape(obs), forward_inputs["unit"].log()
        logprob = a.log() + b.log() + (a - 1) * log_x + (b - 1) * (-torch.expm1(a * log_x)).log()
        entropy = 1 - 1 / b + (1 - 1 / a) * (torch.digamma(b + 1) + 0.5772156649) - a.log() - b.log()
        return Evaluation(logprob, self.value(obs), entropy)

    def value(self, obs: Observations) -> Tensor:
        return self.critic(self.flat(obs)).squeeze(1)

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        return -self.evaluate(obs, {"unit": ((actions - self.low) / self.range).clamp(1e-6, 1 - 1e-6)}).logprob.mean()

    def shape(self, obs: Observations) -> tuple[Tensor, ...]:  # a and b [B,1,A]
        return (1 + nn.functional.softplus(self.actor(self.flat(obs)))).unsqueeze(1).chunk(2, dim=2)


class BoundedSettings(Section):
    type: str = "examples.own_policy.bounded:BoundedSettings"
    hidden: Count = 32

    def form(self, env: EnvSpec) -> PolicyForm:  # one row of forward_inputs; the module tells the rest, without memory
        return describe(lambda _: BoundedPolicy(env, self.hidden), {"unit": ArraySpec((1, env.action.dim), "float32")})

    def build(self, env: EnvSpec, *, seed: int, device: str, role: Role) -> BoundedPolicy:
        with seeded(seed):  # equal seeds give equal parameters
            return BoundedPolicy(env, self.hidden).to(device)
