"""The proximal policy, interpolated between the behaviour policy and the trained one without a forward pass of its
own."""

from __future__ import annotations

import torch
from torch import Tensor


def interpolation(behavior: Tensor, produced: int) -> Tensor:
    """α = clamp((v_p − v_b)/(v_θ − v_b), 0, 1), float32, shaped like behavior (int64), with v_p = v_θ − 1.

    All count updates. behavior: v_b, those in the weights that acted. produced: v_θ, those in the weights that the
    update makes; v_p are in the weights that it begins with, so fresh samples have α = 0. Example: samples of 4, 3 and
    1 updates while the fifth is made: 0, 1/2, 3/4.
    """
    age = (produced - behavior).to(torch.float32)
    return torch.where(age > 0, (age - 1.0) / age.clamp(min=1.0), 0.0).clamp(0.0, 1.0)


def interpolate(logprob: Tensor, behavior: Tensor, alpha: Tensor) -> Tensor:
    """logπ_prox = sg[logπ_b + α·(logπ_θ − logπ_b)] per entry; the others [N], [N,C] or [N,C,A], alpha [N]
    or, where each action has its own, [N,C] (then the others have an entry for each).

    Source: RLinf's asynchronous PPO, section 8.
    """
    trailing = (1,) * (behavior.dim() - alpha.dim())
    return behavior + alpha.reshape(*alpha.shape, *trailing) * (logprob.detach() - behavior)
