"""What a head of the tiny VLA is: from the trunk's feature per action entry to actions and their log-prob.

A head works in units of half the action range, -1..1; `TinyVla` knows the environment's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class HeadAct(NamedTuple):
    """actions [B,C,A], not clipped; logprob [B,C,A]; forward_inputs as in `Act`."""

    actions: Tensor
    logprob: Tensor
    forward_inputs: dict[str, Tensor]


class HeadEvaluation(NamedTuple):
    """logprob and entropy [B,C,A], with gradient."""

    logprob: Tensor
    entropy: Tensor


class Head(Protocol):
    """An `nn.Module`. features [B,C·A,width] are the trunk's, in the order of the action entries."""

    def initialise(self) -> None:
        """Draw the parameters, once all modules of the policy are made."""
        ...

    def act(self, features: Tensor, greedy: Tensor, noise_key: Tensor) -> HeadAct: ...

    def evaluate(self, features: Tensor, forward_inputs: Mapping[str, Tensor]) -> HeadEvaluation: ...

    def sft_loss(self, features: Tensor, actions: Tensor) -> Tensor:
        """Supervised loss (scalar) of actions [B,C,A] in -1..1; a pure function of weights and arguments."""
        ...
