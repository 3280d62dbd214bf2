"""Aggregation against RLinf's formula, written out on the padded grid that it is defined on."""

from __future__ import annotations

import math

import pytest
import torch

from polyrhythm.algorithms import levels
from polyrhythm.algorithms.aggregation import entry_weights, normalizer

CHUNK, ACTION, STEPS = 3, 2, 5
EPISODES = [13, 7, 15, 2]  # executed primitive actions; a rollout has CHUNK * STEPS of them


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_episode_mean_is_the_masked_mean_ratio_of_rlinf(level: levels.LogprobLevel) -> None:
    """Mean over all entries, padding included, of mask · loss · T_max / (the episode's executed actions)."""
    rng = torch.Generator().manual_seed(0)
    most = CHUNK * STEPS
    shape = {"token": (CHUNK, ACTION), "action": (CHUNK,), "chunk": ()}[level]
    padded = torch.randn(len(EPISODES), STEPS, *shape, generator=rng, dtype=torch.float64)
    total, rows, valid, owner = 0.0, [], [], []
    for i, length in enumerate(EPISODES):
        for step in range(math.ceil(length / CHUNK)):
            executed = [step * CHUNK + c < length for c in range(CHUNK)]
            rows.append(padded[i, step])
            valid.append(executed)
            owner.append(i)
            for place, x in enumerate(padded[i, step].flatten().tolist()):
                action = place if level == "action" else place // ACTION
                if level == "chunk" or executed[action]:
                    total += x * most / length
    wanted = total / padded.numel()
    executed_actions, trajectory = torch.tensor(valid), torch.tensor(owner)
    mask = levels.mask(executed_actions, level, ACTION)
    weight = entry_weights(mask, trajectory, "episode_mean", valid=executed_actions)
    got = (weight * torch.stack(rows)).sum() / normalizer(float(weight.sum()), len(weight), "episode_mean")
    assert float(got) == pytest.approx(wanted, rel=1e-6)


def test_mini_batches_of_an_episode_mean_average_to_the_whole() -> None:
    """The divisor is the number of chunk steps, not the sum of the weights."""
    rng = torch.Generator().manual_seed(1)
    x, valid = torch.randn(12, generator=rng), torch.ones(12, 2, dtype=torch.bool)
    weight = entry_weights(valid.any(1), torch.tensor([0] * 9 + [1] * 3), "episode_mean", valid=valid)
    parts = [
        float((weight[a:b] * x[a:b]).sum() / normalizer(float(weight[a:b].sum()), b - a, "episode_mean"))
        for a, b in ((0, 6), (6, 12))
    ]
    whole = float((weight * x).sum() / normalizer(float(weight.sum()), 12, "episode_mean"))
    assert sum(parts) / 2 == pytest.approx(whole, rel=1e-5)


def test_a_sum_is_divided_by_the_constant() -> None:
    weight = entry_weights(
        torch.ones(4).bool(), torch.zeros(4).long(), "sum_over_constant", valid=torch.ones(4, 1).bool()
    )
    assert float(weight.sum()) == 4.0
    assert normalizer(4.0, 4, "sum_over_constant", 20.0) == 20.0
