from __future__ import annotations

import pytest
import torch

from polyrhythm.algorithms import levels
from polyrhythm.algorithms.aggregation import entry_weights, normalizer
from polyrhythm.algorithms.levels import LogprobLevel

VALID = torch.tensor([[True, True], [True, False], [False, False]])


def test_worked_example() -> None:
    x, valid = -torch.ones(1, 2, 3), torch.tensor([[True, False]])
    assert levels.reduce(x, valid, "token").tolist() == [[[-1, -1, -1], [0, 0, 0]]]
    assert levels.reduce(x, valid, "action").tolist() == [[-3, 0]]
    assert levels.reduce(x, valid, "chunk").tolist() == [-3]


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_reduce_golden(level: LogprobLevel) -> None:
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = levels.mask(VALID, level, 4)
    got = levels.reduce(x, VALID, level)
    assert got.shape == mask.shape
    for n in range(3):
        tokens = [[float(x[n, c, a]) if VALID[n, c] else 0.0 for a in range(4)] for c in range(2)]
        wanted = {"token": tokens, "action": [sum(t) for t in tokens], "chunk": sum(map(sum, tokens))}[level]
        torch.testing.assert_close(got[n], torch.tensor(wanted, dtype=torch.float64))
        executed = [bool(v) for v in VALID[n]]
        marked = {"token": [[e] * 4 for e in executed], "action": executed, "chunk": any(executed)}[level]
        assert mask[n].tolist() == marked


@pytest.mark.parametrize("level", ["token", "action", "chunk"])
def test_masked_entries_give_zeros_and_take_no_gradient(level: LogprobLevel) -> None:
    x = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))
    x[~VALID] = torch.nan
    x.requires_grad_()
    got = levels.reduce(x, VALID, level)
    got.sum().backward()
    assert got.isfinite().all()
    assert x.grad is not None
    assert torch.equal(x.grad, VALID.unsqueeze(-1).expand(3, 2, 4).float())


def test_rewards() -> None:
    rewards = torch.tensor([[1.0, 2.0], [3.0, torch.nan], [torch.nan, torch.inf]])
    assert levels.reduce_rewards(rewards, VALID, "chunk").tolist() == [3.0, 3.0, 0.0]
    assert levels.reduce_rewards(rewards, VALID, "action").tolist() == [[1.0, 2.0], [3.0, 0.0], [0.0, 0.0]]
    assert levels.reward_mask(VALID, "chunk").tolist() == [True, True, False]


def test_spread_repeats_an_advantage_over_its_entries() -> None:
    entries = levels.mask(VALID, "token", 2)
    assert levels.spread(torch.tensor([5.0, 6.0, 7.0]), entries)[1].tolist() == [[6.0, 6.0], [0.0, 0.0]]
    assert levels.spread(torch.tensor([[5.0, 4.0]] * 3), entries)[0].tolist() == [[5.0, 5.0], [4.0, 4.0]]
    with pytest.raises(ValueError, match="reward_level"):
        levels.spread(torch.ones(3, 2), levels.mask(VALID, "chunk", 2))


def test_weights_make_the_two_means() -> None:
    """Trajectory 0 has entries 1, 2, 3, trajectory 1 has 10: token mean 4, trajectory mean (2 + 10)/2 = 6."""
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    x, trajectory = torch.tensor([[1.0, 2.0], [3.0, 99.0], [10.0, 99.0]]), torch.tensor([0, 0, 1])
    for kind, wanted in (("token_mean", 4.0), ("trajectory_mean", 6.0)):
        weight = entry_weights(mask, trajectory, kind, valid=mask)  # type: ignore[arg-type]
        assert float((weight * x).sum() / normalizer(float(weight.sum()), len(weight))) == pytest.approx(wanted)


def test_nothing_valid_is_zero_not_nan() -> None:
    nothing = torch.zeros(3, dtype=torch.bool)
    for kind in ("trajectory_mean", "episode_mean"):
        weight = entry_weights(nothing, torch.tensor([0, 0, 1]), kind, valid=nothing.unsqueeze(1))  # type: ignore[arg-type]
        assert float(weight.sum() / normalizer(float(weight.sum()), len(weight), kind)) == 0.0  # type: ignore[arg-type]
