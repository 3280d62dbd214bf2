"""A policy of your own in one file, with a distribution of its own. In the repository's root:
`polyrhythm train examples/own_policy/bounded.yaml`.

Kumaraswamy's distribution is bounded, like the actions of a robot: nothing is clipped, no density lies outside the
limits. Two classes are all that there is to write: settings, and a module that acts and is trained. The environment is
known by its spec alone. Contracts: src/polyrhythm/policies/base.py; `polyrhythm policies` shows what is there already.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.config.base import Count, Section
from polyrhythm.policies import noise
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.policies.form import PolicyForm, Role, describe
from polyrhythm.policies.mlp import FlatObservation, seeded
from polyrhythm.specs import ArraySpec, EnvSpec

#: Units stay that far from 0 and 1, where the density's logarithm has no end.
EDGE = 1e-6
EULER = 0.5772156649


class BoundedSettings(Section):
    """What the recipe's `policy` section may say; `Section` refuses every other key."""

    type: str = "examples.own_policy.bounded:BoundedSettings"
    """Where this class is."""
    hidden: Count = 32
    """Units of the hidden layer of each network."""

    def form(self, env_spec: EnvSpec) -> PolicyForm:
        """Declares one row of forward_inputs; all other shapes come from the module, built without memory."""
        answers = {"unit": ArraySpec((1, env_spec.action.dim), "float32")}
        return describe(lambda _role: self.make(env_spec), answers)

    def build(self, env_spec: EnvSpec, *, seed: int, device: str, role: Role) -> BoundedPolicy:
        with seeded(seed):  # equal seeds give equal parameters, and the global random state stays as it was
            return self.make(env_spec).to(device)

    def make(self, env_spec: EnvSpec) -> BoundedPolicy:
        if env_spec.action.kind != "continuous":
            raise ValueError("policy.type = bounded: it needs continuous actions")
        return BoundedPolicy(env_spec, self.hidden)


class BoundedPolicy(nn.Module):
    """unit ~ Kumaraswamy(a, b) in 0..1 with a, b ≥ 1; the action is low + unit · (high − low)."""

    def __init__(self, env_spec: EnvSpec, hidden: int) -> None:
        super().__init__()
        self.chunk, self.action_dim = 1, env_spec.action.dim
        self.exact, self.tolerance = True, 1e-4  # how well `evaluate` repeats the log-probs of `act`
        self.flat = FlatObservation(env_spec, progress=False)
        self.actor = nn.Sequential(nn.Linear(self.flat.size, hidden), nn.Tanh(), nn.Linear(hidden, 2 * self.action_dim))
        self.critic = nn.Sequential(nn.Linear(self.flat.size, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.register_buffer("low", torch.tensor(env_spec.action.low), persistent=False)
        self.register_buffer("range", torch.tensor(env_spec.action.high) - self.low, persistent=False)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        """Randomness comes from the keys alone, one a row; greedy is the median."""
        a, b = self._shape(obs)
        drawn = noise.uniform(noise_key, self.action_dim).view_as(a)
        uniform = torch.where(greedy.view(-1, 1, 1), torch.full_like(drawn, 0.5), drawn)
        unit = (1 - (1 - uniform) ** (1 / b)) ** (1 / a)  # the inverse of the distribution function
        unit = unit.clamp(EDGE, 1 - EDGE)
        return Act(self.low + unit * self.range, log_density(unit, a, b), self.value(obs), {"unit": unit})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        """The same log-probs with gradient, of what `act` put into forward_inputs."""
        a, b = self._shape(obs)
        return Evaluation(log_density(forward_inputs["unit"], a, b), self.value(obs), entropy(a, b))

    def value(self, obs: Observations) -> Tensor:
        value: Tensor = self.critic(self.flat(obs)).squeeze(1)
        return value

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """For demonstrations: actions [B,1,A] in units of the environment."""
        unit = ((actions - self.low) / self.range).clamp(EDGE, 1 - EDGE)
        return -log_density(unit, *self._shape(obs)).mean()

    def _shape(self, obs: Observations) -> tuple[Tensor, Tensor]:
        """a and b [B,1,A]."""
        shape = 1 + functional.softplus(self.actor(self.flat(obs)))
        a, b = shape.view(-1, 2, self.chunk, self.action_dim).unbind(1)
        return a, b


def log_density(unit: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """log a·b·x^(a−1)·(1−x^a)^(b−1)."""
    log_x = unit.log()
    return a.log() + b.log() + (a - 1) * log_x + (b - 1) * (-torch.expm1(a * log_x)).log()


def entropy(a: Tensor, b: Tensor) -> Tensor:
    """(1 − 1/b) + (1 − 1/a)·H_b − log a·b, with the harmonic number H_b."""
    return 1 - 1 / b + (1 - 1 / a) * (torch.digamma(b + 1) + EULER) - a.log() - b.log()
