"""Micro-batches that are cut by tokens: as many as fit, and the same gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.toy import ToyPolicy, algorithm, collect, training
from torch import Tensor

from polyrhythm.policies.base import Evaluation, Observations
from polyrhythm.policies.traits import policy_traits
from polyrhythm.training.batch import MicroBatchLimits
from polyrhythm.training.learner import Learner
from polyrhythm.training.steps import finish


class CountingPolicy(ToyPolicy):
    """A row has one token more than its first number, rounded up. passes: rows and tokens of each."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.passes: list[tuple[int, int]] = []

    def row_tokens(self, obs: Observations, forward_inputs: object) -> Tensor:
        return 1 + obs["x"][:, 0].abs().ceil().long()

    def evaluate(self, obs: Observations, forward_inputs: Any) -> Evaluation:
        self.passes.append((len(obs["x"]), int(self.row_tokens(obs, forward_inputs).sum())))
        return super().evaluate(obs, forward_inputs)

    def value(self, obs: Observations) -> Tensor:
        self.passes.append((len(obs["x"]), int(self.row_tokens(obs, {}).sum())))
        return super().value(obs)

    def evaluate_longest(self, obs: Observations, forward_inputs: Any) -> Evaluation:
        raise NotImplementedError

    def act_longest(self, obs: Observations) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("steps", "tokens", "sizes"), [(0, 0, [4]), (3, 0, [3, 1]), (0, 8, [2, 1, 1]), (1, 8, [1] * 4), (0, 3, [1] * 4)]
)
def test_as_many_as_fit_go_together(steps: int, tokens: int, sizes: list[int]) -> None:
    policy = CountingPolicy()
    assert policy_traits(policy).counts_tokens
    limits = MicroBatchLimits(policy, steps, tokens)
    assert limits.sizes(4, {"x": torch.tensor([[3.0], [3.0], [8.0], [0.0]])}, {}) == sizes
    assert limits.sizes(0, {"x": torch.zeros(0, 1)}, {}) == []


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_the_update_does_not_depend_on_the_tokens_of_a_micro_batch(proximal: str) -> None:
    policies = []
    for tokens in (0, 6):
        policy = CountingPolicy()
        learner = Learner(
            policy,
            algorithm(
                proximal=proximal, loss="decoupled_ppo" if proximal == "recompute" else "ppo", bootstrap="always"
            ),
            training(micro_batch_tokens=tokens),
            total_updates=1,
            seed=0,
        )
        finish(learner.update(collect(policy, (5, 2, 4)), 0))
        policies.append(policy)
    whole, cut = policies
    for (name, a), b in zip(whole.named_parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert len(cut.passes) > len(whole.passes) + 2
    assert all(tokens <= 6 or rows == 1 for rows, tokens in cut.passes)
