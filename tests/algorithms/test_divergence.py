from __future__ import annotations

import math

import pytest
import torch
from tests.algorithms.reference import loop

from polyrhythm.algorithms.divergence import KL_ESTIMATORS, kl_estimate

OWN = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
OTHER = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
FORMULAS = {
    "k1": lambda own, other: own - other,
    "k2": lambda own, other: (other - own) ** 2 / 2,
    "k3": lambda own, other: math.exp(other - own) - 1 - (other - own),
}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_golden(name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    own, other = (torch.randn(50, generator=rng, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(KL_ESTIMATORS[name](own, other), loop(own.shape, FORMULAS[name], own, other))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_these_estimate_the_divergence_without_bias(name: str) -> None:
    expected = (OWN * KL_ESTIMATORS[name](OWN.log(), OTHER.log())).sum()
    torch.testing.assert_close(expected, (OWN * (OWN / OTHER).log()).sum())


def test_expected_gradients_are_those_of_the_documentation() -> None:
    """k1's is zero, k2's that of KL(own, other), k3's that of KL(other, own); over actions that `own` takes."""
    logits = OWN.log().clone().requires_grad_()
    found = {}
    for name, estimate in KL_ESTIMATORS.items():
        own = logits.log_softmax(0)
        (found[name],) = torch.autograd.grad((OWN * estimate(own, OTHER.log())).sum(), logits)
    own = logits.log_softmax(0)
    (reverse,) = torch.autograd.grad((own.exp() * (own - OTHER.log())).sum(), logits, retain_graph=True)
    (forward,) = torch.autograd.grad((OTHER * (OTHER.log() - own)).sum(), logits)
    torch.testing.assert_close(found["k1"], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(found["k2"], reverse)
    torch.testing.assert_close(found["k3"], forward)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_wild_entries_stay_finite(name: str) -> None:
    own = torch.tensor([1e4, -1e4], requires_grad=True)
    estimate = KL_ESTIMATORS[name](own, torch.zeros(2))
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert own.grad is not None
    assert own.grad.isfinite().all()


def test_a_cap_bounds_k3_and_its_gradient() -> None:
    own, other = torch.zeros(3, requires_grad=True), torch.tensor([4.0, 1.0, -9.0])
    capped = kl_estimate(own, other, "k3", cap=10.0)
    assert capped.tolist() == pytest.approx([10.0, math.e - 2.0, math.exp(-9.0) + 8.0])
    (gradient,) = torch.autograd.grad(capped.sum(), own)
    assert gradient.tolist() == pytest.approx([0.0, 1.0 - math.e, 1.0 - math.exp(-9.0)])
    assert kl_estimate(own, other, "k3")[0].item() == pytest.approx(math.exp(4.0) - 5.0)


def test_k2_pulls_back_from_any_distance() -> None:
    own = torch.tensor([50.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_estimate(own, torch.zeros(1), "k2"), own)
    assert gradient.item() == 50.0
