"""Defines the interface of a tiny VLA's head: from the trunk's feature per action entry to actions and log-probs.

A head works in units of half the action range, -1..1; `TinyVla` converts to the environment's units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class HeadAct(NamedTuple):
    """A head's answer to `act`: actions [B,C,A], not clipped; logprob [B,C,A]; forward_inputs as in `Act`."""

    actions: Tensor
    logprob: Tensor
    forward_inputs: dict[str, Tensor]


class HeadEvaluation(NamedTuple):
    """A head's answer to `evaluate`: logprob and entropy [B,C,A], with gradient."""

    logprob: Tensor
    entropy: Tensor


class Head(Protocol):
    """A head, an `nn.Module`. features [B,C·A,width]: the trunk's, in the order of the action entries."""

    def initialise(self) -> None:
        """Draw the parameters, after all modules of the policy exist."""
        ...

    def act(self, features: Tensor, greedy: Tensor, noise_key: Tensor) -> HeadAct: ...

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> HeadEvaluation: ...

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of actions [B,C,A] in -1..1; a pure function of weights and arguments."""
        ...
