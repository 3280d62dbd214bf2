"""What rank processes do in tests of several ranks."""

from __future__ import annotations

from typing import Any

import torch
from tests.training.toy import ToyPolicy, algorithm, training
from torch import Tensor

from polyrhythm.specs import Trajectory
from polyrhythm.training.learner import Learner
from polyrhythm.training.ranks import Ranks
from polyrhythm.training.steps import Metrics, finish


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients_of(learner: Learner) -> dict[str, Tensor]:
    named = learner._module.named_parameters()
    return {name: full(p.grad).detach().clone() for name, p in named if p.grad is not None}


def first_gradients(
    ranks: Ranks, cases: list[tuple[dict[str, Any], dict[str, Any], list[Trajectory]]]
) -> list[tuple[dict[str, Tensor], Metrics]]:
    """Of each case (algorithm, training, trajectories) the gradient of the first optimizer step, and the metrics of the
    whole update."""
    answers = []
    for settings, train, trajectories in cases:
        policy = ToyPolicy(per_action=settings.get("reward_level") == "action", dtype=torch.float32)
        learner = Learner(policy, algorithm(**settings), training(**train), total_updates=10, seed=7, ranks=ranks)
        steps = learner.update(trajectories, 0, version=4)
        next(steps)
        found = gradients_of(learner)
        answers.append((found, finish(steps)))
    return answers
