"""A vision-language-action policy small enough to post-train on one core: 0.14 million parameters.

It has the parts of the large ones (image, sentence and proprioception in, a chunk of binned actions out, all tokens in
one parallel pass), so that every path of the system is exercised by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import SETTINGS, Act, Evaluation, Observations
from polyrhythm.policies.gaussian import continuous_bounds
from polyrhythm.policies.mlp import seeded
from polyrhythm.policies.tiny_vla_trunk import Trunk, TrunkSize
from polyrhythm.policies.words import word_table
from polyrhythm.specs import INSTRUCTION, PROGRESS, ArraySpec, EnvSpec


class TinyVlaSettings(BaseModel):
    """Tiny vision-language-action model with binned actions."""

    model_config = SETTINGS
    needs: ClassVar = ("torch",)

    type: Literal["tiny_vla"] = "tiny_vla"
    """The policy's name."""
    width: int = Field(64, ge=8)
    """Features per token."""
    layers: int = Field(2, ge=1)
    """Transformer layers."""
    heads: int = Field(4, ge=1)
    """Attention heads; divides width."""
    expansion: int = Field(3, ge=1)
    """Hidden units of a transformer layer's MLP, in multiples of width."""
    tokens: int = Field(8, ge=1)
    """Tokens that the image is reduced to."""
    words: int = Field(8, ge=1)
    """Most words of an instruction."""
    vocabulary: int = Field(256, ge=2)
    """Rows of the word embedding that words are hashed into."""
    bins: int = Field(32, ge=2)
    """Bins per action entry; an action is a bin's centre."""
    chunk: int = Field(2, ge=1)
    """Primitive actions per chunk step (C)."""
    label_sigma: float = Field(0.10, gt=0.0)
    """Width of the soft labels of supervised training, in units of half the action range."""
    greedy: Literal["mean", "mode"] = "mean"
    """Greedy action of an entry: the bin nearest to its expectation, or the likeliest bin. Reinforcement learning makes
    neighbouring bins uneven, so the likeliest one can be far from where most of the probability lies."""
    value_detach: bool = True
    """Keep the value loss out of the trunk; letting it in destroyed small policies."""

    @model_validator(mode="after")
    def _heads_divide_width(self) -> TinyVlaSettings:
        if self.width % self.heads:
            raise ValueError(
                f"policy.heads = {self.heads} does not divide policy.width = {self.width}: choose a divisor"
            )
        return self

    def build(self, env_spec: EnvSpec, seed: int) -> TinyVla:
        """The policy for this environment, its parameters a function of `seed`."""
        with seeded(seed):
            return TinyVla(self, env_spec)


class TinyVla(nn.Module):
    """obs: image uint8 [B,H,W,3], proprio float [B,P], `INSTRUCTION` int64 [B], `PROGRESS` float32 [B].

    Each of the C·A action entries is drawn from its own 32 bins; forward_inputs = {"tokens": int64 [B,C,A]}.
    The value head sees the value query's feature and `PROGRESS`. `exact` is claimed on the CPU.
    """

    centres: Tensor
    middle: Tensor
    half_range: Tensor

    def __init__(self, settings: TinyVlaSettings, env_spec: EnvSpec) -> None:
        super().__init__()
        low, high = continuous_bounds(env_spec.action, "tiny_vla")
        height, width_px, _ = _array(env_spec, "image", "uint8", (None, None, 3)).shape
        (proprio,) = _array(env_spec, "proprio", "float32", (None,)).shape
        self.chunk, self.action_dim = settings.chunk, env_spec.action.dim
        self.exact, self.tolerance = True, 1e-4
        self.value_detach, self.label_sigma = settings.value_detach, settings.label_sigma
        self.greedy = settings.greedy
        self.trunk = Trunk(
            (height, width_px),
            proprio,
            word_table(env_spec.tasks, settings.words, settings.vocabulary),
            queries=1 + self.chunk * self.action_dim,
            size=TrunkSize(**settings.model_dump(include={field.name for field in fields(TrunkSize)})),
        )
        self.bins = nn.Linear(settings.width, settings.bins)
        self.critic = nn.Sequential(
            nn.Linear(settings.width + 1, settings.width), nn.Tanh(), nn.Linear(settings.width, 1)
        )
        nn.init.normal_(self.bins.weight, std=0.02)
        nn.init.zeros_(self.bins.bias)
        centres = (torch.arange(settings.bins) + 0.5) * (2.0 / settings.bins) - 1.0
        for name, value in (("centres", centres), ("middle", (high + low) / 2), ("half_range", (high - low) / 2)):
            self.register_buffer(name, value, persistent=False)

    @torch.no_grad()
    def act(self, obs: Observations, greedy: Tensor, noise_key: Tensor) -> Act:
        log_p, value = self._forward(obs)
        draws = noise.uniform(noise_key, self.chunk * self.action_dim).view(log_p.shape[:-1])
        best = distributions.categorical_mean(log_p) if self.greedy == "mean" else log_p.argmax(-1)
        tokens = distributions.categorical_sample(log_p, draws, greedy, best)
        actions = self.middle + self.half_range * self.centres[tokens]
        return Act(actions, distributions.categorical_logprob(log_p, tokens), value, {"tokens": tokens})

    def evaluate(self, obs: Observations, forward_inputs: Mapping[str, Tensor]) -> Evaluation:
        log_p, value = self._forward(obs)
        logprob = distributions.categorical_logprob(log_p, forward_inputs["tokens"])
        return Evaluation(logprob, value, distributions.categorical_entropy(log_p))

    def value(self, obs: Observations) -> Tensor:
        return self._forward(obs)[1]

    def sft_loss(self, obs: Observations, actions: Tensor) -> Tensor:
        """Cross entropy against labels smeared over the bins near actions [B,C,A] (env units), mean over entries."""
        wanted = ((actions.float() - self.middle) / self.half_range).clamp(-1.0, 1.0)
        labels = (-0.5 * ((self.centres - wanted.unsqueeze(-1)) / self.label_sigma).square()).softmax(-1)
        return -(labels * self._forward(obs)[0]).sum(-1).mean()

    def _forward(self, obs: Observations) -> tuple[Tensor, Tensor]:
        """Log-probs of the bins [B,C,A,bins] and value [B]: one definition for rollout and training."""
        features = self.trunk(obs["image"], obs["proprio"], obs[INSTRUCTION])
        logits = self.bins(features[:, 1:]).view(-1, self.chunk, self.action_dim, len(self.centres))
        seen = features[:, 0].detach() if self.value_detach else features[:, 0]
        value = self.critic(torch.cat((seen, obs[PROGRESS].float().unsqueeze(1)), dim=1)).squeeze(1)
        return distributions.log_probs(logits), value


def _array(env_spec: EnvSpec, name: str, dtype: str, shape: tuple[int | None, ...]) -> ArraySpec:
    """The named observation array if it has this dtype and shape (None: any size)."""
    found = env_spec.observation.get(name)
    fits = (
        found is not None
        and found.dtype == dtype
        and len(found.shape) == len(shape)
        and all(want in (None, size) for want, size in zip(shape, found.shape, strict=True))
    )
    if found is None or not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"policy.type = 'tiny_vla' needs the observation {name!r} as {dtype} [{wanted}], the environment shows "
            f"{dict(env_spec.observation)}: switch it on in the env's settings, or use policy.type = 'gaussian'"
        )
    return found
