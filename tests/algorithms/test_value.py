from __future__ import annotations

import pytest
import torch
from tests.algorithms.reference import loop, value_entry
from torch import Tensor

from polyrhythm.algorithms.value import value_loss


def test_worked_example() -> None:
    one = torch.ones(1)
    value = value_loss(2 * one, 0 * one, one, one.bool(), clip=0.2, huber=None)
    assert value.item() == pytest.approx(0.5)


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("huber", [None, 0.5, 10.0])
def test_value_golden(clip: float | None, huber: float | None) -> None:
    rng = torch.Generator().manual_seed(6)
    value, old, target = (torch.randn(60, generator=rng, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(60, generator=rng) > 0.2
    got = value_loss(value, old, target, mask, clip=clip, huber=huber)
    wanted = loop(value.shape, value_entry, value, old, target, clip, huber) * mask
    torch.testing.assert_close(got, wanted)

    def scalar(x: Tensor) -> Tensor:
        return value_loss(x, old, target, mask, clip=clip, huber=huber).sum()

    assert torch.autograd.gradcheck(scalar, (value.requires_grad_(),))


def test_masked_values_never_matter() -> None:
    value = torch.tensor([1.0, torch.nan], requires_grad=True)
    old, target = torch.tensor([0.5, torch.inf]), torch.tensor([0.0, torch.nan])
    loss = value_loss(value, old, target, torch.tensor([True, False]), clip=0.2, huber=1.0)
    loss.sum().backward()
    assert loss.tolist() == [0.5, 0.0]
    assert value.grad is not None
    assert value.grad.tolist() == [1.0, 0.0]
