"""A small real policy, trajectories that it collected, and settings: what the tests of training share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyrhythm.config.sections.algorithm import AlgorithmSettings
from polyrhythm.config.sections.learning import TrainingSettings
from polyrhythm.policies.base import Act, Evaluation, Observations
from polyrhythm.specs import Trajectory

FEATURES, CHUNK, DIM, CHOICES = 5, 2, 3, 4


class ToyPolicy(nn.Module):
    """Independent categorical tokens over a small MLP; the value reads the trunk, detached if so wanted."""

    chunk, action_dim, exact, tolerance = CHUNK, DIM, True, 0.0

    def __init__(
        self, *, seed: int = 0, detach: bool = True, per_action: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.detach, self.per_action = detach, per_action
        self.rows_seen: list[int] = []
        self.trunk = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.logits = nn.Linear(16, CHUNK * DIM * CHOICES)
        self.critic = nn.Linear(16, CHUNK if per_action else 1)
        rng = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=rng) * 0.4)
        self.to(dtype)

    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        with torch.no_grad():
            logp, value = self.heads(obs)
            rng = torch.Generator().manual_seed(int(noise_key.sum()))
            noise = -torch.empty_like(logp).exponential_(generator=rng).log()
            tokens = torch.where(greedy.reshape(-1, 1, 1), logp.argmax(-1), (logp + noise).argmax(-1))
            picked = logp.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return Act(tokens.float(), picked.float(), value.float(), {"tokens": tokens})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        logp, value = self.heads(obs)
        picked = logp.gather(-1, forward_inputs["tokens"].unsqueeze(-1)).squeeze(-1)
        return Evaluation(picked, value, -(logp.exp() * logp).sum(-1))

    def value(self, obs: Observations) -> Tensor:
        return self.heads(obs)[1]

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        logp = self.heads(obs)[0]
        return -logp.gather(-1, actions.long().unsqueeze(-1)).mean()

    def heads(self, obs: Observations) -> tuple[Tensor, Tensor]:
        self.rows_seen.append(len(obs["x"]))
        feature = self.trunk(obs["x"].to(self.critic.weight.dtype))
        logp = self.logits(feature).reshape(-1, CHUNK, DIM, CHOICES).log_softmax(-1)
        value = self.critic(feature.detach() if self.detach else feature)
        return logp, value if self.per_action else value.squeeze(-1)


def collect(policy: ToyPolicy, lengths: tuple[int, ...] = (4, 1, 6, 3), seed: int = 0) -> list[Trajectory]:
    """Trajectories of the given chunk steps acted by `policy`; every second one is truncated, the others end early
    in their last chunk. Reward: how many tokens are 0."""
    rng = np.random.default_rng(seed)
    out = []
    for i, steps in enumerate(lengths):
        x = rng.normal(size=(steps + 1, FEATURES)).astype(np.float32)
        keys = torch.arange(steps) + 1000 * i + seed
        act = policy.act({"x": torch.from_numpy(x[:-1])}, torch.zeros(steps, dtype=torch.bool), keys)
        cut = i % 2 == 1
        valid = np.ones((steps, CHUNK), dtype=np.bool_)
        valid[-1, 1:] = cut
        rewards = (act.actions.numpy() == 0).mean(-1).astype(np.float32) * valid
        out.append(
            Trajectory(
                obs={"x": x},
                actions=act.actions.numpy(),
                logprob=act.logprob.numpy(),
                value=act.value.numpy(),
                forward_inputs={k: v.numpy() for k, v in act.forward_inputs.items()},
                rewards=rewards,
                valid=valid,
                version=np.full(steps, i, dtype=np.int64),
                terminated=not cut,
                truncated=cut,
                success=not cut,
                env_steps=int(valid.sum()),
                ticket=i,
                group=i,
                task=0,
            )
        )
    return out


def spoiled(trajectory: Trajectory) -> Trajectory:
    """The same sample with rubbish wherever the mask is False."""
    logprob, rewards = trajectory.logprob.copy(), trajectory.rewards.copy()
    value = trajectory.value.copy()
    logprob[~trajectory.valid], rewards[~trajectory.valid] = np.nan, np.inf
    if value.shape == trajectory.valid.shape:
        value[~trajectory.valid] = np.nan
    return replace(trajectory, logprob=logprob, rewards=rewards, value=value)


def algorithm(**changes: Any) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(
        {"value": {"clip": 0.2, "huber": 1.0}, "entropy_coef": 0.01, "normalize_rewards": False} | changes
    )


def training(**changes: Any) -> TrainingSettings:
    usual = {
        "versions": 10,
        "mini_batch_samples": 4,
        "epochs": 1,
        "minibatch_steps": 0,
        "max_kl": None,
        "optimizer": {"lr": 0.01, "weight_decay": 0.01},
    }
    return TrainingSettings.model_validate(usual | changes)


def weights(policy: ToyPolicy) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in policy.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit-equal."""
    return all(torch.equal(a[name], b[name]) for name in a)
