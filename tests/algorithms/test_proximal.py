from __future__ import annotations

import pytest
import torch

from polyrhythm.algorithms.proximal import interpolate, interpolation


@pytest.mark.parametrize("produced", [1, 3, 8])
def test_alpha_golden(produced: int) -> None:
    versions = list(range(10))
    wanted = []
    for behaviour in versions:
        if produced <= behaviour:
            wanted.append(0.0)
        else:
            wanted.append(min(max((produced - 1 - behaviour) / (produced - behaviour), 0.0), 1.0))
    assert interpolation(torch.tensor(versions), produced).tolist() == pytest.approx(wanted)


def test_worked_example() -> None:
    assert interpolation(torch.tensor([4, 3, 1]), 5).tolist() == [0.0, 0.5, 0.75]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 4)])
def test_interpolated_log_probs_lie_between_and_have_no_gradient(shape: tuple[int, ...]) -> None:
    rng = torch.Generator().manual_seed(0)
    now, then = (torch.randn(shape, generator=rng, dtype=torch.float64) for _ in range(2))
    alpha = torch.tensor([0.0, 0.5, 0.75])
    got = interpolate(now.clone().requires_grad_(), then, alpha)
    assert not got.requires_grad
    assert torch.equal(got[0], then[0])
    torch.testing.assert_close(got[1], (then[1] + now[1]) / 2)
    torch.testing.assert_close(got[2], then[2] + 0.75 * (now[2] - then[2]))
