"""Implements a head that draws each action entry independently from a categorical distribution over bins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from polyrhythm.policies import distributions, noise
from polyrhythm.policies.base import SETTINGS
from polyrhythm.policies.tiny_vla.head import HeadAct, HeadEvaluation
from polyrhythm.specs import ArraySpec


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
        """The head's forward_inputs of one row."""
        return {"tokens": ArraySpec((chunk, action_dim), "int64")}

    def build(self, width: int, chunk: int, action_dim: int) -> BinsHead:
        """A head on features of this width."""
        return BinsHead(self, width, (chunk, action_dim))


class BinsHead(nn.Module):
    """The head with bins. forward_inputs = {"tokens": int64 [B,C,A]}, the bin indices."""

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

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> HeadEvaluation:
        log_p = self._log_p(features)
        logprob = distributions.categorical_logprob(log_p, forward_inputs["tokens"])
        return HeadEvaluation(logprob, distributions.categorical_entropy(log_p))

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Cross entropy against labels smoothed over the bins near the actions, mean over entries."""
        labels = (-0.5 * ((self.centres - actions.unsqueeze(-1)) / self.label_sigma).square()).softmax(-1)
        return -(labels * self._log_p(features)).sum(-1).mean()

    def _log_p(self, features: Tensor) -> Tensor:
        """Log-probs of the bins [B,C,A,bins]."""
        return distributions.log_probs(self.logits(features).view(-1, *self.shape, len(self.centres)))
