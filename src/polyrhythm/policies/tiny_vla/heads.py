"""Heads of the tiny VLA, from features to actions and log-probs: action bins as tokens, and flow matching."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, Protocol, Self

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import SETTINGS, section_or
from polyrhythm.policies.flow_matching import FlowMethod, FlowNoise, Network, between, check_steps, start_noise
from polyrhythm.specs import ArraySpec


class HeadAct(NamedTuple):
    """Result of a head's `act`: actions [B,C,A], not clipped; logprob [B,C,A]; forward_inputs as in `Act`."""

    actions: Tensor
    logprob: Tensor
    forward_inputs: dict[str, Tensor]


class Head(Protocol):
    """A head, an `nn.Module`. features [B,C·A,width]: the trunk's, in the order of the action entries."""

    def initialise(self) -> None:
        """Initialise the parameters, after all modules of the policy exist."""

    def act(self, features: Tensor, greedy: Tensor, noise_key: Tensor) -> HeadAct: ...

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy [B,C,A], with gradient."""

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of actions [B,C,A] in -1..1; a pure function of weights and arguments."""


class BinsSettings(BaseModel):
    """Head with binned actions."""

    model_config = SETTINGS

    type: Literal["bins"] = "bins"
    """The head's name."""
    bins: int = Field(32, ge=2)
    """Bins per action entry; an action is a bin's centre."""
    label_sigma: float = Field(0.10, gt=0.0)
    """Width of the soft labels of supervised training, in units of half the action range."""
    greedy: Literal["mean", "mode"] = "mean"
    """Greedy action of an entry: the bin nearest to its expectation, or the likeliest bin. Reinforcement learning makes
    neighbouring bins uneven, so the likeliest one can be far from where most of the probability lies."""

    def answers(self, chunk: int, action_dim: int) -> dict[str, ArraySpec]:
        return {"tokens": ArraySpec((chunk, action_dim), "int64")}

    def build(self, width: int, chunk: int, action_dim: int) -> BinsHead:
        return BinsHead(self, width, (chunk, action_dim))


class BinsHead(nn.Module):
    """Head with binned actions. forward_inputs = {"tokens": int64 [B,C,A]}, the bin indices."""

    centres: Tensor

    def __init__(self, settings: BinsSettings, width: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, self.label_sigma, self.greedy = shape, settings.label_sigma, settings.greedy
        self.logits = nn.Linear(width, settings.bins)
        centres = (torch.arange(settings.bins) + 0.5) * (2.0 / settings.bins) - 1.0
        self.register_buffer("centres", centres, persistent=False)

    def initialise(self) -> None:
        nn.init.normal_(self.logits.weight, std=0.02)
        nn.init.zeros_(self.logits.bias)

    def act(self, features: Tensor, greedy: Tensor, noise_key: Tensor) -> HeadAct:
        log_p = self._log_p(features)
        draws = noise.uniform(noise_key, self.shape[0] * self.shape[1]).view(log_p.shape[:-1])
        best = distributions.categorical_mean(log_p) if self.greedy == "mean" else log_p.argmax(-1)
        tokens = distributions.categorical_sample(log_p, draws, greedy, best)
        return HeadAct(self.centres[tokens], distributions.categorical_logprob(log_p, tokens), {"tokens": tokens})

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        log_p = self._log_p(features)
        logprob = distributions.categorical_logprob(log_p, forward_inputs["tokens"])
        return logprob, distributions.categorical_entropy(log_p)

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Cross entropy against labels smoothed over the bins near the actions, averaged over entries."""
        labels = (-0.5 * ((self.centres - actions.unsqueeze(-1)) / self.label_sigma).square()).softmax(-1)
        return -(labels * self._log_p(features)).sum(-1).mean()

    def _log_p(self, features: Tensor) -> Tensor:
        """Log-probs of the bins [B,C,A,bins]."""
        return distributions.log_probs(self.logits(features).view(-1, *self.shape, len(self.centres)))


_FREQUENCIES = 8
#: Pairs of time and noise for each action of a supervised step; they share the trunk's forward pass, the main cost.
_SFT_DRAWS = 8


class FlowMatchingSettings(BaseModel):
    """Head with flow matching."""

    model_config = SETTINGS

    type: Literal["flow_matching"] = "flow_matching"
    """The head's name."""
    steps: int = Field(4, ge=1)
    """Steps from noise to actions (K)."""
    hidden: int = Field(64, ge=1)
    """Units per hidden layer of the network."""
    method: Annotated[FlowMethod, Field(discriminator="type"), section_or("flow_noise")] = Field(
        {"type": "flow_noise"}, validate_default=True
    )
    """Where noise enters: flow_noise (all steps, learned), flow_sde, flow_cps (one per row), ode (none: not for RL)."""

    @model_validator(mode="after")
    def _method_has_a_noisy_step(self) -> Self:
        check_steps(self.method, self.steps)
        return self

    def answers(self, chunk: int, action_dim: int) -> dict[str, ArraySpec]:
        return self.method.answers(self.steps, (chunk, action_dim))

    def build(self, width: int, chunk: int, action_dim: int) -> FlowMatchingHead:
        return FlowMatchingHead(self, width, (chunk, action_dim))


class FlowMatchingHead(nn.Module):
    """The flow-matching head. forward_inputs: the method's (`flow_matching`); log-prob: of the unclipped chain."""

    frequencies: Tensor

    def __init__(self, settings: FlowMatchingSettings, width: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.shape, hidden, entries = shape, settings.hidden, shape[0] * shape[1]
        self.method, self.steps = settings.method, settings.steps
        self.learned = self.method if isinstance(self.method, FlowNoise) else None
        self.from_features = nn.Linear(width, hidden)
        self.from_chunk = nn.Linear(entries, hidden, bias=False)
        self.from_entry = nn.Linear(1, hidden, bias=False)
        self.from_time = nn.Linear(_FREQUENCIES, hidden, bias=False)
        self.hidden = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1 if self.learned is None else 2)
        frequencies = math.pi * torch.arange(1, _FREQUENCIES + 1)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def initialise(self) -> None:
        """Initialise for unit variance through each linear map and a first prediction near zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)

    def act(self, features: Tensor, greedy: Tensor, noise_key: Tensor) -> HeadAct:
        network = self._network(features)
        start = torch.where(greedy.view(-1, 1, 1), 0.0, start_noise(self.shape, noise_key))
        actions, kept = self.method.sample(network, self.steps, start, greedy, noise_key)
        return HeadAct(actions, self.method.evaluate(network, self.steps, kept)[0], kept)

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.method.evaluate(self._network(features), self.steps, forward_inputs)

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Flow-matching loss weighted by t², plus the fit of learned noise.

        The former is the mean squared error of the predicted data, over times in (0, 1]. Times and noise are functions
        of the actions and of the output layer's weights. Each optimizer step changes the weights and so the draws,
        without any state: a resumed warm start continues bit-equal.
        """
        key = noise.content_keys(actions) ^ noise.content_keys(self.out.weight.detach().reshape(1, -1))
        phase = noise.uniform(key, 1, stream=0)
        t = (torch.arange(_SFT_DRAWS, device=key.device) + phase) / _SFT_DRAWS  # [B,draws], one in each part of (0,1)
        data = actions.float().flatten(1).unsqueeze(1)
        seen = self.from_features(features).unsqueeze(1)
        predicted = self.out(self._hidden(seen, _noisy(data, t, key, stream=1), t))[..., 0]
        loss: Tensor = (predicted - data).square().mean()
        return loss if self.learned is None else loss + self._misfit(self.learned, seen, data, key)

    def _misfit(self, learned: FlowNoise, seen: Tensor, data: Tensor, key: Tensor) -> Tensor:
        """Loss of the learned noise against the residual errors of its steps, at their start times. Its gradient
        reaches the trunk through the noise, not through the prediction."""
        t = learned.times(self.steps, data).expand(len(data), -1)
        predicted = self.out(self._hidden(seen, _noisy(data, t, key, stream=2), t))
        error = data - predicted[..., 0].detach().float()
        return learned.misfit(self.steps, error, t.unsqueeze(-1), predicted[..., 1])

    def _network(self, features: Tensor) -> Network:
        seen = self.from_features(features)

        def network(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
            predicted = self.out(self._hidden(seen, x.flatten(1), t)).float().unflatten(1, self.shape)
            velocity = (x - predicted[..., 0]) / t.view(-1, 1, 1)
            return velocity, None if self.learned is None else predicted[..., 1]

        return network

    def _hidden(self, seen: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """seen [...,C·A,hidden], x [...,C·A], t [...] -> [...,C·A,hidden], the input of `out`."""
        time = torch.cos(t.unsqueeze(-1) * self.frequencies)
        chunk = self.from_chunk(x) + self.from_time(time)
        h = functional.gelu(seen + chunk.unsqueeze(-2) + self.from_entry(x.unsqueeze(-1)), approximate="tanh")
        return h + functional.gelu(self.hidden(h), approximate="tanh")


def _noisy(data: Tensor, t: Tensor, key: Tensor, stream: int) -> Tensor:
    """States of data [B,1,C·A] at times t [B,n] -> [B,n,C·A]."""
    draws = noise.normal(key, t.shape[1] * data.shape[2], stream).view(len(key), t.shape[1], -1)
    return between(data, draws, t.unsqueeze(-1))[0]
