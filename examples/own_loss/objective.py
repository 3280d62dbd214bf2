"""A loss and an advantage of your own, with settings, in one file. `polyrhythm train objective.yaml`, here.

Both are functions of tensors: the first argument is what they see, their keywords are their settings, and gamma comes
from `algorithm`. What they give is tried on a few numbers before anything starts. Sections "Your own" and "Advantages"
of docs/objectives.md have the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyrhythm.algorithms.advantages import AdvantageInput
from polyrhythm.algorithms.losses import LossInput, LossOutput


def quadratic(entries: LossInput, *, epsilon: float = 0.2) -> LossOutput:
    """−(r·A − |A|·(r−1)²/2ε): instead of clipping the ratio, distance from 1 costs (Xie et al. 2024, SPO).

    For A > 0 the best ratio is 1 + ε, for A < 0 it is 1 − ε, and there is a gradient back to it from everywhere.
    `distance` is logged, as train/actor/distance.
    """
    ratio = (entries.logprob - entries.proximal).exp()
    price = entries.advantage.abs() * (ratio - 1).square() / (2 * epsilon)
    return LossOutput(price - ratio * entries.advantage, {"distance": (ratio - 1).abs().detach()})


def n_step(samples: AdvantageInput, *, gamma: float, steps: int = 16) -> Tensor:
    """A_t = r_t + γ·r_{t+1} + … + γⁿ·V_{t+n} − V_t, n = `steps`, or fewer where the sample ends before.

    The decisions of all samples stand one after another. A tensor alone is the advantage; the value function is then
    trained on what `gae` gives.
    """
    if samples.rewards.dim() != 1:
        raise ValueError("n_step wants one reward for a decision; set algorithm.reward_level to chunk")
    advantages = torch.zeros_like(samples.rewards)
    for number, final_value in enumerate(samples.bootstrap):
        own = samples.trajectory == number
        rewards, values = samples.rewards[own], samples.values[own]
        expected = torch.cat((values, final_value[None]))
        for _ in range(steps):  # one more reward, and the rest as expected before
            expected[:-1] = rewards + gamma * expected[1:]
        advantages[own] = expected[:-1] - values
    return advantages
